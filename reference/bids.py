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
    PlacementRequest,
    Plan,
    RegionSnapshot,
    RunningWorkload,
)
from reference.criteria import PlacementOption, PlacementTarget, criteria, quality
from reference.crowds import crowding_of, others_at
from reference.packing import (
    Free,
    cluster_targets,
    free_now,
    most_tasks,
    place_job,
    release,
    spanning_targets,
    take,
    without_room,
)
from reference.together import not_together
from rms.refusal import needs


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
    request = _largest(snapshot, request)
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


def _largest(snapshot: RegionSnapshot, request: PlacementRequest) -> PlacementRequest:
    """Returns the request with the largest number of tasks of an elastic job that fits without evictions."""
    job, there = request.jobs[0], _avoiding(snapshot, request)
    free = free_now(there)
    for tasks in range(job.most_tasks, job.tasks, -1):
        sized = replace(job, tasks=tasks)
        if any(
            place_job(sized, place, free) for place in cluster_targets(there, sized) + spanning_targets(there, sized)
        ):
            return replace(request, jobs=(sized,))
    return request


def _avoiding(snapshot: RegionSnapshot, request: PlacementRequest) -> RegionSnapshot:
    machines = [without_room(m) if m.id in request.avoids else m for m in snapshot.machines]
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
        return Bid(request.workload, snapshot.region, None, (*reasons, *_in_other_pools(snapshot, lacking[0])))

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
    free = free_now(snapshot)
    victims: list[RunningWorkload] = []
    choices: list[PlacementOption] = []
    for job in request.jobs:
        candidates = [w for w in allowed if w not in victims]
        options: list[PlacementOption] = []
        # First without evictions, then with evictions; each in a single cluster and across clusters.
        for others in ([], candidates):
            for place in cluster_targets(snapshot, job) + spanning_targets(snapshot, job) if not options else ():
                chosen = _victims_for(job, place, free, others)
                if chosen is not None:
                    after = release(free, chosen)
                    spread = place_job(job, place, after)
                    assert spread is not None
                    options.append(_option(snapshot, job, place, spread, after, chosen))
        if not options:
            until_s = _protected_until_s(snapshot, request)
            room = _no_room(snapshot, request, job, free, candidates, allowed, until_s)
            together = not_together(snapshot, job, free, release(free, candidates))
            why = (room, *_in_other_pools(snapshot, job), *together, *later)
            return Bid(request.workload, snapshot.region, None, why, retry_at_s=min(until_s, again_s))
        best = min(options, key=lambda option: criteria(snapshot, option))
        free = take(release(free, best.victims), job, best.spread)
        victims.extend(best.victims)
        choices.append(best)

    return _without_unneeded(snapshot, choices, victims)


def _in_other_pools(snapshot: RegionSnapshot, job: JobRequest) -> list[Reason]:
    """Returns a reason that names the pools whose machines the job could use if they were not for other tenants."""
    pools = {
        m.pool
        for m in snapshot.machines
        if m.pool
        and m.capacity not in job.capacity
        and m.capacity.split(":")[-1] in job.capacity
        and (job.gpus_per_task == 0 or m.gpu_type in job.gpu_types)
    }
    return [Reason(ReasonCode.IN_OTHER_POOLS, {"region": snapshot.region, "pools": sorted(pools)})] if pools else []


def _option(
    snapshot: RegionSnapshot,
    job: JobRequest,
    place: PlacementTarget,
    spread: dict[str, int],
    free: Free,
    victims: list[RunningWorkload],
) -> PlacementOption:
    """Returns an option, with what it leaves over of the machines on which `free` is available to it."""
    opened = pieces = 0
    for machine in snapshot.machines if job.gpus_per_task else ():
        if machine.id in spread:
            before = free[machine.id][0]
            after = before - spread[machine.id] * job.gpus_per_task
            pieces += after
            opened += before == machine.gpus and after > 0
    return PlacementOption(job, place, spread, opened, pieces, tuple(victims))


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


# ------------------------------------------------------------------------------------------------------------ eviction


def _victims_for(
    job: JobRequest, place: PlacementTarget, free: Free, candidates: list[RunningWorkload]
) -> list[RunningWorkload] | None:
    """Returns the victims that make room for the job: empty if it already fits, None if evicting all is not enough."""

    def fits(victims: list[RunningWorkload]) -> bool:
        return place_job(job, place, release(free, victims)) is not None

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
    free = release(free_now(snapshot), victims)
    choices = []
    for job in jobs:
        options: list[PlacementOption] = []
        for places in (cluster_targets(snapshot, job), spanning_targets(snapshot, job)):
            for place in places if not options else ():
                spread = place_job(job, place, free)
                if spread is not None:
                    options.append(_option(snapshot, job, place, spread, free, []))
        if not options:
            return None
        best = min(options, key=lambda option: criteria(snapshot, option))
        free = take(free, job, best.spread)
        choices.append(best)
    return choices


def _as_it_was(
    snapshot: RegionSnapshot, choices: list[PlacementOption], victims: list[RunningWorkload]
) -> list[PlacementOption] | None:
    """Returns the given choices if they still fit with exactly these victims evicted, else None."""
    free = release(free_now(snapshot), victims)
    for choice in choices:
        free = take(free, choice.job, choice.spread)
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
    return "+".join(sorted({m.cluster for m in snapshot.machines if m.id in choice.spread}))


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
    places = cluster_targets(snapshot, job) + spanning_targets(snapshot, job)
    return any(place_job(job, place, empty) is not None for place in places if not place.together)


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
    usable = {m.id for job in request.jobs for place in cluster_targets(snapshot, job) for m in place.attempts[-1]}
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
    free: Free,
    candidates: list[RunningWorkload],
    allowed: list[RunningWorkload],
    protected_until_s: float,
) -> Reason:
    most_free = release(free, candidates)
    placeable = max(
        most_tasks(job, place.attempts[-1], most_free)
        for place in cluster_targets(snapshot, job) + spanning_targets(snapshot, job)
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
