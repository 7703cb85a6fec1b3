"""Whom to evict for one job in one group (MAST 4.3): few, of the lowest priority, and nobody who is not needed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from domain.scheduling import JobRequest, PlacementRequest
from rms.packing import capacity
from rms.region import Free, Group, Held, Holder, Region


def evictable(region: Region, request: PlacementRequest) -> list[Holder]:
    """Whom the request may evict, in the order of the scan: lowest priority first, longest running first, then id.

    Only strictly lower priority, nobody protected or on the way out, and nobody who evicted this workload before.
    """
    return sorted(
        (
            holder
            for holder in region.holders
            if holder.workload.evictable
            and holder.workload.rank > request.rank
            and holder.workload.id not in request.may_not_evict
        ),
        key=lambda h: (-h.workload.rank, h.workload.started_at_s, h.workload.id),
    )


class Fit:
    """How many of a job's tasks fit on some machines, kept up to date as victims come and go."""

    def __init__(self, job: JobRequest, machines: Iterable[int], free: Free) -> None:
        """Starts from what is free."""
        self._job = job
        self._free = {m: (free.gpus[m], free.cpus_milli[m], free.memory_bytes[m]) for m in machines}
        self._capacity = {m: capacity(job, *amounts) for m, amounts in self._free.items()}
        self.tasks = sum(self._capacity.values())

    @property
    def suffices(self) -> bool:
        """Whether all tasks of the job fit."""
        return self.tasks >= self._job.tasks

    def release(self, held: Iterable[Held], sign: int = 1) -> None:
        """Frees what a victim holds on these machines."""
        for m, gpus, cpus_milli, memory_bytes in held:
            free = self._free[m]
            amounts = (free[0] + sign * gpus, free[1] + sign * cpus_milli, free[2] + sign * memory_bytes)
            fit = capacity(self._job, *amounts)
            self.tasks += fit - self._capacity[m]
            self._free[m], self._capacity[m] = amounts, fit

    def withhold(self, held: Iterable[Held]) -> None:
        """Takes back what `release` freed."""
        self.release(held, -1)


@dataclass(frozen=True)
class _Candidate:
    holder: Holder
    held: tuple[Held, ...]
    """On the machines of the group."""

    def size_order(self, by_gpus: bool) -> tuple[int, int, str]:
        """Largest first by the resource that the job is about, then by the other, then by id."""
        gpus, cpus_milli = sum(h.gpus for h in self.held), sum(h.cpus_milli for h in self.held)
        id_ = self.holder.workload.id
        return (-gpus, -cpus_milli, id_) if by_gpus else (-cpus_milli, -gpus, id_)


def choose_victims(job: JobRequest, group: Group, free: Free, scan: Sequence[Holder]) -> list[Holder] | None:
    """The victims whose machines make room for the job in the group; None if all of `scan` are not enough.

    Collects victims in the order of the scan until the job fits. Then takes the collected ones again from the largest
    until it fits, and last drops, from the smallest, each one without which it still fits. (For 10 GPUs from 4, 5 and
    12: only the 12.)
    """
    fit = Fit(job, group.eligible, free)
    scanned: list[_Candidate] = []
    for holder in scan:
        held = holder.on(group)
        if held:
            scanned.append(_Candidate(holder, held))
            fit.release(held)
            if fit.suffices:
                break
    else:
        return None
    fit = Fit(job, group.eligible, free)
    by_gpus = job.gpus_per_task > 0
    kept: list[_Candidate] = []
    for candidate in sorted(scanned, key=lambda c: c.size_order(by_gpus)):
        fit.release(candidate.held)
        kept.append(candidate)
        if fit.suffices:
            break
    needed: list[Holder] = []
    for candidate in reversed(kept):
        fit.withhold(candidate.held)
        if not fit.suffices:
            fit.release(candidate.held)
            needed.append(candidate.holder)
    return needed


def placeable(job: JobRequest, group: Group, free: Free, scan: Iterable[Holder]) -> int:
    """How many of the job's tasks fit in the group with everything free that `scan` holds there."""
    fit = Fit(job, group.eligible, free)
    for holder in scan:
        fit.release(holder.on(group))
    return fit.tasks
