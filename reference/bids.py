"""Plain reference implementation of `rms.bid`, for tests and benchmarks only.

It follows MAST 4.3 step by step on machine ids and dictionaries. It tries every cluster and GPU type for every job, and
checks whether a job fits by placing it.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from domain.capacity import USUAL
from domain.priority import OVER_QUOTA_RANK, level_of, over_quota_rank
from domain.reasons import Reason, ReasonCode, in_words
from domain.scheduling import (
    Bid,
    JobPlacement,
    JobRequest,
    MachineState,
    PlacementRequest,
    Plan,
    RegionSnapshot,
    RunningWorkload,
)
from reference.criteria import PlacementOption, PlacementTarget, Spread, criteria, quality
from reference.crowds import crowding_of, others_at
from rms.refusal import needs

_Free = dict[str, tuple[int, int, int]]
"""Maps machine ids to free GPUs, CPUs (thousandths of a core) and memory (bytes)."""


def best(plans: Iterable[Plan]) -> Plan | None:
    """Returns the plan with the smallest `Plan.key`, which is a total order of the plans of different regions."""
    return min(plans, default=None, key=lambda plan: plan.key)


_BEFORE_MOVE = (
    "victims_by_rank", "lost_gpu_s", "youngest_victim_started_at_s", "spanning", "type_preference",
    "capacity_preference", "doubts", "away",
)  # fmt: skip


_Found = tuple[list[PlacementOption], list[RunningWorkload]]
"""The placements of all jobs, and the victims."""


def bid(snapshot: RegionSnapshot, request: PlacementRequest) -> Bid:
    """Returns the region's bid, with the same result as `rms.bid.bid`."""
    running = [
        replace(w, rank=over_quota_rank(level_of(w.rank))) if _is_displaced(w, request) else w for w in snapshot.running
    ]
    snapshot = replace(snapshot, running=tuple(running))
    request = _sparing(snapshot, request)
    crowding = crowding_of(snapshot, request.spread)
    if request.spread is not None and request.spread.required:
        too_close = {machine for machine, counts in crowding.items() if counts[0]} - request.avoids
        request = replace(request, avoids=request.avoids | too_close, too_close=frozenset(too_close))
    found = _found(snapshot, request)
    if isinstance(found, Bid):
        return found
    plan, avoids = _plan(snapshot, request, *found), request.avoids
    for group in (request.failed, request.untried, request.shuns):
        if not any(m in group for job in plan.jobs for m, _ in job.machines):
            continue
        other = _found(snapshot, replace(request, avoids=avoids | group))
        if isinstance(other, Bid):
            continue
        without = _plan(snapshot, request, *other)
        mine, its = ([getattr(p.quality, name) for name in _BEFORE_MOVE] for p in (without, plan))
        if mine <= its:
            found, plan, avoids = other, without, avoids | group
    # The first better plan on machines that are less crowded by the group.
    for most in sorted({counts for counts in crowding.values() if counts < plan.quality.crowding}):
        crowded = {machine for machine, counts in crowding.items() if counts > most}
        other = _found(snapshot, replace(request, avoids=avoids | crowded))
        if isinstance(other, Bid):
            continue
        apart = _plan(snapshot, request, *other)
        if apart.quality.key < plan.quality.key:
            found, plan, avoids = other, apart, avoids | crowded
            break
    if avoids != request.avoids:
        # With all machines, fewer victims may be enough.
        fewer = _without_unneeded(_avoiding(snapshot, request), *found)
        if len(fewer[1]) < len(found[1]):
            plan = _plan(snapshot, request, *fewer)
    return Bid(request.workload, snapshot.region, plan)


def _avoiding(snapshot: RegionSnapshot, request: PlacementRequest) -> RegionSnapshot:
    machines = [_without_room(m) if m.id in request.avoids else m for m in snapshot.machines]
    return replace(snapshot, machines=tuple(machines))


def _found(snapshot: RegionSnapshot, request: PlacementRequest) -> Bid | _Found:
    """Returns a plan on all machines that the request does not avoid, or a refusal."""
    lacking = [job for job in request.jobs if not _could_ever_fit(snapshot, job)]
    if lacking:
        there = {machine.capacity for machine in snapshot.machines} or USUAL
        reasons = [
            Reason(ReasonCode.NO_HARDWARE, {"region": snapshot.region, "job": job.name, "needs": needs(job, there)})
            for job in lacking
        ]
        return Bid(request.workload, snapshot.region, None, tuple(reasons))

    allowed = [
        w
        for w in snapshot.running
        if w.evictable
        and w.protected_until_s <= snapshot.now_s
        and w.rank > request.rank
        and w.id not in request.may_not_evict
    ]
    allowed.sort(key=lambda w: (-w.rank, w.started_at_s, w.id))
    snapshot = _avoiding(snapshot, request)
    left_out = sorted(request.avoids.intersection(m.id for m in snapshot.machines))
    later, again_s = _later(snapshot, request, left_out)
    free = _free_now(snapshot)
    victims: list[RunningWorkload] = []
    choices: list[PlacementOption] = []
    for job in request.jobs:
        candidates = [w for w in allowed if w not in victims]
        options: list[PlacementOption] = []
        # First without evictions, then with evictions; each in a single cluster and across clusters.
        for others in ([], candidates):
            for place in _places(snapshot, job) + _spanning_places(snapshot, job) if not options else ():
                chosen = _victims_for(job, place, free, others)
                if chosen is not None:
                    spread = _place_job(job, place, _release(free, chosen))
                    assert spread is not None
                    options.append(PlacementOption(job, place, spread, tuple(chosen)))
        if not options:
            until_s = _protected_until_s(snapshot, request)
            why = (_no_room(snapshot, request, job, free, candidates, allowed, until_s), *later)
            return Bid(request.workload, snapshot.region, None, why, retry_at_s=min(until_s, again_s))
        best = min(options, key=lambda option: criteria(snapshot, option))
        free = _take(_release(free, best.victims), job, best.spread)
        victims.extend(best.victims)
        choices.append(best)

    return _without_unneeded(snapshot, choices, victims)


def _sparing(snapshot: RegionSnapshot, request: PlacementRequest) -> PlacementRequest:
    """Returns the request, which may not evict over-quota workloads of its own tenant with an equal or better level."""
    spares = {
        w.id
        for w in snapshot.running
        if w.tenant
        and w.tenant == request.tenant
        and request.rank < OVER_QUOTA_RANK <= w.rank
        and level_of(w.rank) <= request.rank
    }
    return replace(request, may_not_evict=request.may_not_evict | spares, spares=frozenset(spares))


def _is_displaced(workload: RunningWorkload, request: PlacementRequest) -> bool:
    return workload.id in request.displaces and workload.rank > request.rank


# ------------------------------------------------------------------------------------------------------ free resources


def _free_now(snapshot: RegionSnapshot) -> _Free:
    return {m.id: (m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) for m in snapshot.machines}


def _without_room(machine: MachineState) -> MachineState:
    """Returns a machine of which nothing is free, even if all its workloads are evicted."""
    return replace(
        machine,
        free_gpus=machine.free_gpus - machine.gpus,
        free_cpus_milli=machine.free_cpus_milli - machine.cpus_milli,
        free_memory_bytes=machine.free_memory_bytes - machine.memory_bytes,
    )


def _release(free: _Free, victims: list[RunningWorkload] | tuple[RunningWorkload, ...]) -> _Free:
    released = dict(free)
    for victim in victims:
        for held in victim.holdings:
            if held.machine in released:
                gpus, cpus, memory = released[held.machine]
                released[held.machine] = (gpus + held.gpus, cpus + held.cpus_milli, memory + held.memory_bytes)
    return released


def _take(free: _Free, job: JobRequest, spread: Spread) -> _Free:
    left = dict(free)
    for machine, tasks in spread.items():
        gpus, cpus, memory = left[machine]
        left[machine] = (
            gpus - tasks * job.gpus_per_task,
            cpus - tasks * job.cpus_milli_per_task,
            memory - tasks * job.memory_bytes_per_task,
        )
    return left


def _places(snapshot: RegionSnapshot, job: JobRequest) -> list[PlacementTarget]:
    places = []
    allowed = _allowed(snapshot, job)
    for cluster in sorted({m.cluster for m in allowed}):
        machines = tuple(m for m in allowed if m.cluster == cluster)
        if job.gpus_per_task == 0:
            places.append(
                PlacementTarget(cluster, None, 0, (tuple(m for m in machines if m.gpu_type is None), machines))
            )
            continue
        for preference, gpu_type in enumerate(job.gpu_types):
            places.append(
                PlacementTarget(cluster, gpu_type, preference, (tuple(m for m in machines if m.gpu_type == gpu_type),))
            )
    return places


def _allowed(snapshot: RegionSnapshot, job: JobRequest) -> tuple[MachineState, ...]:
    """Returns the machines whose capacity kind the job accepts."""
    return tuple(m for m in snapshot.machines if m.capacity in job.capacity)


def _spanning_places(snapshot: RegionSnapshot, job: JobRequest) -> list[PlacementTarget]:
    """Returns the options that treat all clusters as one; empty if the job must stay in one cluster."""
    if not job.span_clusters:
        return []
    allowed = _allowed(snapshot, job)
    if job.gpus_per_task == 0:
        return [PlacementTarget("", None, 0, (tuple(m for m in allowed if m.gpu_type is None), allowed))]
    return [
        PlacementTarget("", gpu_type, preference, (tuple(m for m in allowed if m.gpu_type == gpu_type),))
        for preference, gpu_type in enumerate(job.gpu_types)
    ]


def _tasks_that_fit(job: JobRequest, amounts: tuple[int, int, int]) -> int:
    wanted = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    return max(0, min(amount // want for amount, want in zip(amounts, wanted, strict=True) if want))


# ------------------------------------------------------------------------------------------------------------- packing


def _place_job(job: JobRequest, place: PlacementTarget, free: _Free) -> Spread | None:
    for machines in place.attempts:
        spread = _pack(job, job.tasks, list(machines), free)
        if spread is not None:
            return spread
    return None


def _pack(job: JobRequest, tasks: int, machines: list[MachineState], free: _Free) -> Spread | None:
    room = {m.id: _tasks_that_fit(job, free[m.id]) for m in machines}
    if sum(room.values()) < tasks:
        return None
    spread: Spread = {}
    while True:
        one = _on_one_machine(job, tasks, machines, room, free)
        if one is not None:
            return {**spread, **one}
        racks = _racks(machines)
        options = []
        for rack, members in racks.items():
            option = _within_rack(job, tasks, members, room, free)
            if option is not None:
                options.append((len(option), sum(room[m.id] for m in members), rack, option))
        if options:
            return {**spread, **min(options, key=lambda option: option[:3])[3]}
        largest = min(racks, key=lambda rack: (-sum(room[m.id] for m in racks[rack]), rack))
        for machine in racks[largest]:
            if room[machine.id]:
                spread[machine.id] = room[machine.id]
                tasks -= room[machine.id]
        machines = [m for m in machines if (m.cluster, m.rack) != largest]


def _racks(machines: list[MachineState]) -> dict[tuple[str, str], list[MachineState]]:
    names = sorted({(m.cluster, m.rack) for m in machines})
    return {rack: [m for m in machines if (m.cluster, m.rack) == rack] for rack in names}


def _on_one_machine(
    job: JobRequest, tasks: int, machines: list[MachineState], room: dict[str, int], free: _Free
) -> Spread | None:
    def tightness(machine: MachineState) -> tuple[int, int, int, str]:
        gpus, cpus, _ = free[machine.id]
        left_gpus, left_cpus = gpus - tasks * job.gpus_per_task, cpus - tasks * job.cpus_milli_per_task
        return (room[machine.id], left_gpus, left_cpus, machine.id)

    fitting = [m for m in machines if room[m.id] >= tasks]
    return {min(fitting, key=tightness).id: tasks} if fitting else None


def _within_rack(
    job: JobRequest, tasks: int, members: list[MachineState], room: dict[str, int], free: _Free
) -> Spread | None:
    if sum(room[m.id] for m in members) < tasks:
        return None
    spread: Spread = {}
    left = list(members)
    while True:
        last = _on_one_machine(job, tasks, left, room, free)
        if last is not None:
            return {**spread, **last}
        largest = min(left, key=lambda m: (-room[m.id], free[m.id][0] - room[m.id] * job.gpus_per_task, m.id))
        spread[largest.id] = room[largest.id]
        tasks -= room[largest.id]
        left.remove(largest)


# ------------------------------------------------------------------------------------------------------------ eviction


def _victims_for(
    job: JobRequest, place: PlacementTarget, free: _Free, candidates: list[RunningWorkload]
) -> list[RunningWorkload] | None:
    """Returns the victims that make room for the job: empty if it already fits, None if evicting all is not enough."""

    def fits(victims: list[RunningWorkload]) -> bool:
        return _place_job(job, place, _release(free, victims)) is not None

    if fits([]):
        return []
    eligible = {m.id for m in place.attempts[-1]}
    scanned: list[RunningWorkload] = []
    for candidate in candidates:
        if any(h.machine in eligible and (h.gpus or h.cpus_milli or h.memory_bytes) for h in candidate.holdings):
            scanned.append(candidate)
            if fits(scanned):
                break
    if not fits(scanned):
        return None

    def largest_first(candidate: RunningWorkload) -> tuple[int, int, str]:
        gpus = sum(h.gpus for h in candidate.holdings if h.machine in eligible)
        cpus = sum(h.cpus_milli for h in candidate.holdings if h.machine in eligible)
        return (-gpus, -cpus, candidate.id) if job.gpus_per_task else (-cpus, -gpus, candidate.id)

    scanned.sort(key=largest_first)
    kept: list[RunningWorkload] = []
    for candidate in scanned:
        kept.append(candidate)
        if fits(kept):
            break
    for candidate in reversed(list(kept)):
        without = [other for other in kept if other is not candidate]
        if fits(without):
            kept = without
    return kept


# ------------------------------------------------------------------------------------------------ the gang as a whole


def _anew(
    snapshot: RegionSnapshot, jobs: list[JobRequest], victims: list[RunningWorkload]
) -> list[PlacementOption] | None:
    """Plans all jobs again with exactly these victims evicted; returns None if a job does not fit."""
    free = _release(_free_now(snapshot), victims)
    choices = []
    for job in jobs:
        options: list[PlacementOption] = []
        for places in (_places(snapshot, job), _spanning_places(snapshot, job)):
            for place in places if not options else ():
                spread = _place_job(job, place, free)
                if spread is not None:
                    options.append(PlacementOption(job, place, spread, ()))
        if not options:
            return None
        best = min(options, key=lambda option: criteria(snapshot, option))
        free = _take(free, job, best.spread)
        choices.append(best)
    return choices


def _as_it_was(
    snapshot: RegionSnapshot, choices: list[PlacementOption], victims: list[RunningWorkload]
) -> list[PlacementOption] | None:
    """Returns the given choices if they still fit with exactly these victims evicted, else None."""
    free = _release(_free_now(snapshot), victims)
    for choice in choices:
        free = _take(free, choice.job, choice.spread)
    used = {machine for choice in choices for machine in choice.spread}
    return choices if all(min(free[machine]) >= 0 for machine in used) else None


def _without_unneeded(
    snapshot: RegionSnapshot, choices: list[PlacementOption], victims: list[RunningWorkload]
) -> _Found:
    if not victims:
        return choices, victims
    jobs = [choice.job for choice in choices]
    choices = _anew(snapshot, jobs, victims) or choices
    while True:
        before = len(victims)
        for victim in sorted(victims, key=lambda v: (v.rank, sum(h.gpus for h in v.holdings), v.id)):
            rest = [other for other in victims if other is not victim]
            without = _anew(snapshot, jobs, rest) or _as_it_was(snapshot, choices, rest)
            if without is not None:
                choices, victims = without, rest
        if len(victims) == before:
            return choices, victims


def _clusters(snapshot: RegionSnapshot, choice: PlacementOption) -> str:
    return choice.place.cluster or "+".join(sorted({m.cluster for m in snapshot.machines if m.id in choice.spread}))


def _plan(
    snapshot: RegionSnapshot, request: PlacementRequest, choices: list[PlacementOption], victims: list[RunningWorkload]
) -> Plan:
    placements = tuple(
        JobPlacement(c.job.name, _clusters(snapshot, c), c.place.gpu_type, tuple(sorted(c.spread.items())))
        for c in choices
    )
    evicted = tuple(sorted(v.id for v in victims))
    used = {machine for choice in choices for machine in choice.spread}
    doubts = sum(2 if m in request.failed else m in request.untried for m in used)
    crowding = crowding_of(snapshot, request.spread)
    most = max((crowding[machine] for machine in used if crowding), default=(0, 0, 0, 0))
    rated = replace(quality(snapshot, choices, victims), doubts=doubts, crowding=most)
    return Plan(request.workload, snapshot.region, placements, evicted, rated)


# ------------------------------------------------------------------------------------------------------------ refusals


def _could_ever_fit(snapshot: RegionSnapshot, job: JobRequest) -> bool:
    empty = {m.id: (m.gpus, m.cpus_milli, m.memory_bytes) for m in snapshot.machines}
    places = _places(snapshot, job) + _spanning_places(snapshot, job)
    return any(_place_job(job, place, empty) is not None for place in places)


def _later(snapshot: RegionSnapshot, request: PlacementRequest, avoided: list[str]) -> tuple[list[Reason], float]:
    """Returns the reasons that name avoided machines, and when the first of them changes."""
    region, reasons, until_s = snapshot.region, list[Reason](), inf
    too_open = [machine for machine in avoided if machine in request.too_open]
    if too_open:
        reasons.append(Reason(ReasonCode.ISOLATION_TOO_WEAK, {"region": region, "machines": too_open}))
    no_engine = [machine for machine in avoided if machine in request.no_engine]
    if no_engine:
        reasons.append(Reason(ReasonCode.NO_CONTAINER_ENGINE, {"region": region, "machines": no_engine}))
    close = [machine for machine in avoided if machine in request.too_close]
    if close and request.spread is not None:
        places = sorted("/".join(name) or "(without a name)" for name in others_at(snapshot, request.spread))
        near = {"region": snapshot.region, "level": request.spread.over.value, "places": places}
        reasons.append(Reason(ReasonCode.SPREAD_REQUIRED, near))
    known = request.too_open | request.no_engine | request.too_close
    avoided = [machine for machine in avoided if machine not in known]
    if avoided:
        until_s = request.avoids_until_s
        detail: dict[str, object] = {"region": region, "machines": avoided}
        if until_s < inf:
            detail["until"] = in_words(until_s)
        reasons.append(Reason(ReasonCode.MACHINES_AVOIDED, detail))
    return reasons, until_s


def _protected_until_s(snapshot: RegionSnapshot, request: PlacementRequest) -> float:
    """Returns when the first workload can be evicted that now cannot, of those on machines that one job may use."""
    usable = {m.id for job in request.jobs for place in _places(snapshot, job) for m in place.attempts[-1]}
    ends_s = [
        w.protected_until_s
        for w in snapshot.running
        if w.evictable
        and snapshot.now_s < w.protected_until_s < inf
        and w.rank > request.rank
        and w.id not in request.may_not_evict
        and any(h.machine in usable and (h.gpus or h.cpus_milli or h.memory_bytes) for h in w.holdings)
    ]
    return min(ends_s, default=inf)


def _no_room(
    snapshot: RegionSnapshot,
    request: PlacementRequest,
    job: JobRequest,
    free: _Free,
    candidates: list[RunningWorkload],
    allowed: list[RunningWorkload],
    protected_until_s: float,
) -> Reason:
    most_free = _release(free, candidates)
    placeable = max(
        sum(_tasks_that_fit(job, most_free[m.id]) for m in place.attempts[-1])
        for place in _places(snapshot, job) + _spanning_places(snapshot, job)
    )
    return Reason(
        ReasonCode.INSUFFICIENT_CAPACITY,
        {
            "region": snapshot.region,
            "job": job.name,
            "tasks": job.tasks,
            "placeable": placeable,
            "evictable": len(allowed),
        }
        | ({"protected_until": in_words(protected_until_s)} if protected_until_s < inf else {})
        | ({"own": len(request.spares)} if request.spares else {}),
    )
