"""Plain reference implementation of the choice of victims for one job (`rms.victims`)."""

from domain.priority import LOWEST_RANK
from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
from domain.spread import SpreadLevel
from reference.criteria import PlacementTarget, quality
from reference.packing import Free, most_tasks, place_job, release


def victims_for(
    snapshot: RegionSnapshot, job: JobRequest, place: PlacementTarget, free: Free, candidates: list[RunningWorkload]
) -> list[RunningWorkload] | None:
    """Returns the victims that make room for the job: empty if it already fits, None if evicting all is not enough."""

    def fits(victims: list[RunningWorkload]) -> bool:
        return place_job(job, place, release(free, victims)) is not None

    if fits([]):
        return []
    scanned: list[RunningWorkload] = []
    for candidate in candidates:
        if _held_on(candidate, place):
            scanned.append(candidate)
            if fits(scanned):
                break
    if not fits(scanned):
        return None
    kept = _fewest(job, place, free, scanned)
    if len(kept) > 1:
        others = _fewest(job, place, free, _by_place(job, place, free, candidates))
        ratings = [quality(snapshot, [], victims).key[:3] for victims in (kept, others)]
        if ratings[1] < ratings[0]:
            return others
    return kept


def _held_on(candidate: RunningWorkload, place: PlacementTarget) -> set[str]:
    """Returns the machines that the job may use and on which a workload holds something."""
    eligible = {m.id for m in place.attempts[-1]}
    return {
        h.machine for h in candidate.holdings if h.machine in eligible and (h.gpus or h.cpus_milli or h.memory_bytes)
    }


def _fewest(
    job: JobRequest, place: PlacementTarget, free: Free, scanned: list[RunningWorkload]
) -> list[RunningWorkload]:
    """Returns those of the workloads that are needed: the largest first, then without those that are not needed."""

    def fits(victims: list[RunningWorkload]) -> bool:
        return place_job(job, place, release(free, victims)) is not None

    def largest_first(candidate: RunningWorkload) -> tuple[int, int, str]:
        held = [h for h in candidate.holdings if h.machine in _held_on(candidate, place)]
        gpus, cpus = sum(h.gpus for h in held), sum(h.cpus_milli for h in held)
        return (-gpus, -cpus, candidate.id) if job.gpus_per_task else (-cpus, -gpus, candidate.id)

    kept: list[RunningWorkload] = []
    for candidate in sorted(scanned, key=largest_first):
        kept.append(candidate)
        if fits(kept):
            break
    for candidate in reversed(list(kept)):
        without = [other for other in kept if other is not candidate]
        if fits(without):
            kept = without
    return kept


def _by_place(
    job: JobRequest, place: PlacementTarget, free: Free, candidates: list[RunningWorkload]
) -> list[RunningWorkload]:
    """Returns the candidates on whole machines (racks, if tasks must share racks) until the job fits.

    Those with the least weight of candidates for each task come first.
    """
    by_rack = job.topology.tasks_by(SpreadLevel.RACK, job.tasks, prefers=place.together) > 1
    groups: dict[tuple[str, ...], list[MachineState]] = {}
    for m in place.attempts[-1]:
        groups.setdefault((m.cluster, m.rack) if by_rack else (m.id,), []).append(m)
    after = release(free, candidates)

    def tasks(members: list[MachineState], amounts: Free) -> int:
        return most_tasks(job, members, amounts, together=place.together)

    fits = most_tasks(job, place.attempts[-1], free, together=place.together)
    missing, weighed = job.tasks - fits, []
    for name, members in groups.items():
        gain = tasks(members, after) - tasks(members, free)
        ids = {m.id for m in members}
        weight = sum(8 ** (LOWEST_RANK - w.rank) * len(_held_on(w, place) & ids) for w in candidates)
        if gain > 0:
            weighed.append((weight * 840 // min(gain, missing), name, gain, ids))
    chosen: set[str] = set()
    for _, _, gain, ids in sorted(weighed, key=lambda one: one[:2]):
        if fits < job.tasks:
            chosen |= ids
            fits += gain
    return [w for w in candidates if _held_on(w, place) & chosen]
