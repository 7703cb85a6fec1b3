"""The GMS-scan pass (MAST 4.2): gives every workload its rank and credit, and puts the pending ones in order."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from domain.priority import LOWEST_LEVEL, OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from domain.scheduling import CreditWeights, QueueSnapshot, Ranked, ScanResult
from gms import kernels
from gms.columns import QueueColumns
from gms.credit import average_share, fair_credit
from gms.demand import HoldingColumns

UNLIMITED = -1


@dataclass(frozen=True)
class Scan:
    """One pass over a queue, as columns by row. Valid until the queue changes."""

    queue: QueueColumns
    order: npt.NDArray[np.int32]
    """Rows of pending workloads in queue order."""
    rank: npt.NDArray[np.int8]
    """1..8 by row; 0: held."""
    credit: npt.NDArray[np.float64]
    placed_rank: npt.NDArray[np.int8]
    _pick_at: npt.NDArray[np.int32]
    _picks: npt.NDArray[np.int32]
    lacks: npt.NDArray[np.int16]
    used: npt.NDArray[np.int64]
    needed: npt.NDArray[np.int64]
    _quota_cpus: npt.NDArray[np.int64]
    _quota_gpus: npt.NDArray[np.int64]
    _displacing: npt.NDArray[np.int64]
    _holdings: HoldingColumns

    def __iter__(self) -> Iterator[Ranked]:
        """All pending workloads in queue order."""
        return (self.ranked(int(row)) for row in self.order)

    def ranked(self, row: int) -> Ranked:
        """One pending workload that is not held."""
        rank, over = int(self.rank[row]), self.rank[row] == OVER_QUOTA_RANK
        jobs = self.queue.gangs[int(self.queue.pending.columns["wants"][row])]
        types = tuple(job.gpu_types for job in jobs)
        if self._pick_at[row] != kernels.NO_PICK:
            first = int(self._pick_at[row])
            picks = self._picks[first : first + len(jobs)]
            types = tuple((t[pick],) if job.gpus and t else t for job, t, pick in zip(jobs, types, picks, strict=True))
        return Ranked(
            self.queue.pending.name(row),
            rank,
            LOWEST_LEVEL if over else rank,
            bool(over),
            float(self.credit[row]),
            types,
            self._reason(row) if over else None,
            self._displaces(row),
        )

    @cached_property
    def _displacing_at(self) -> dict[int, int]:
        """By the row of a pending workload that displaces placed ones, where it is in `_displacing`."""
        return {row: place for place, row in enumerate(self._displacing[:, 0].tolist())}

    def _displaces(self, row: int) -> tuple[str, ...]:
        place = self._displacing_at.get(row)
        if place is None:
            return ()
        placed, t = self.queue.placed.columns, int(self.queue.pending.columns["tenant"][row])
        used = self._displacing[place, 1:].copy()
        rows = kernels.displaced(
            t, self.queue.tenants[t].level, int(self.rank[row]), placed["tenant"],
            placed["requested_level"], self.placed_rank, placed["wants"], self._holdings,
            self._quota_cpus[t : t + 1], self._quota_gpus[t : t + 1],
            used[:1], used[None, 1:],
        )  # fmt: skip
        return tuple(sorted(self.queue.placed.name(row) for row in rows.tolist()))

    def _reason(self, row: int) -> Reason:
        tenant = self.queue.tenants[int(self.queue.pending.columns["tenant"][row])]
        used, needs, lacks = int(self.used[row]), int(self.needed[row]), int(self.lacks[row])
        if lacks < len(self.queue.gangs.types):
            resource = self.queue.gangs.type_name(lacks)
            numbers: tuple[float, ...] = (used, tenant.quota_gpus.get(resource, 0), needs)
        else:
            resource, numbers = "cpus", tuple(map(_cores, (used, tenant.quota_cpus_milli or 0, needs)))
        detail = dict(
            zip(("tenant", "resource", "used", "quota", "needs"), (tenant.name, resource, *numbers), strict=True)
        )
        return Reason(ReasonCode.QUOTA_EXCEEDED, detail)

    def result(self) -> ScanResult:
        """The pass as values."""
        placed = {self.queue.placed.name(row): int(rank) for row, rank in enumerate(self.placed_rank)}
        return ScanResult(tuple(self), placed)


def scan(snapshot: QueueSnapshot) -> ScanResult:
    """Ranks everything in a snapshot: `scan_queue` for those who have no queue at hand.

    Raises:
        ValueError: a workload, held or not, names a tenant that the snapshot lacks.
    """
    return scan_queue(QueueColumns.of(snapshot), snapshot.now_s, snapshot.weights).result()


def scan_queue(queue: QueueColumns, now_s: float, weights: CreditWeights) -> Scan:
    """Ranks everything that is pending or placed.

    A tenant's quota goes to its most important level first; a workload's level is its tenant's, or the one that it
    requests if that is lower. Within a level it goes to what is placed first, oldest award first, then to what is
    pending, most credit first. Whatever fits what is left of the quota counts against it and takes its level as its
    rank; anything else is over-quota, counts for nothing, and a later, smaller one may still fit. No decision depends
    on another tenant's, except through the credit.

    What is placed is judged without what is pending: it loses its rank only when something more important of its
    tenant is awarded. So a pending workload is judged by what is placed of its level and above and by what is pending
    before it, and may be within quota only because less important placed work is counted after it. `Ranked.displaces`
    is that work as far as it will be over-quota once the pending workload, and those before it, are awarded.

    A workload that may run on several GPU types counts against all of them until it is placed: its *envelope*. So
    whatever type RMS picks, the tenant never exceeds its quota with within-quota workloads. Where the envelope is too
    much, each of its jobs in turn gets the first of its types for which quota is left after the jobs before it. A
    refusal names the resource that is lacking: the most preferred type of the first job without a type left, else CPUs.

    Held workloads are neither ranked nor counted. The queue is in the order: rank, more credit, submitted earlier, id.
    """
    tenants = queue.tenants
    types = max(1, len(queue.gangs.types))
    quota_gpus = np.zeros((len(tenants), types), np.int64)
    for number, tenant in enumerate(tenants):
        for gpu_type, slots in tenant.quota_gpus.items():
            if gpu_type in queue.gangs.types:
                quota_gpus[number, queue.gangs.types[gpu_type]] = slots
    limits = [UNLIMITED if t.quota_cpus_milli is None else t.quota_cpus_milli for t in tenants]
    quota_cpus = np.array(limits, np.int64)
    level = np.array([t.level for t in tenants], np.int8)
    average = average_share(t for t in tenants if t.name)
    fair = np.array([fair_credit(weights, t.window_share, average) for t in tenants], np.float64)
    total_cpus, total_gpus = np.zeros(len(tenants), np.int64), np.zeros_like(quota_gpus)
    placed, pending = queue.placed.columns, queue.pending.columns
    holdings = queue.holdings.held
    placed_rank = kernels.walk_placed(
        placed["tenant"], placed["requested_level"], placed["wants"], holdings,
        level, quota_cpus, quota_gpus, total_cpus, total_gpus,
    )  # fmt: skip
    rank, credit, pick_at, picks, lacks, used, needed, displacing = kernels.walk_pending(
        placed["tenant"], placed_rank, placed["wants"], holdings,
        pending["tenant"], queue.pending.at_s, pending["requested_level"], pending["held"], pending["wants"],
        queue.gangs.demand,
        level, fair, quota_cpus, quota_gpus, total_cpus, total_gpus, now_s, weights.w_age, weights.age_cap_s,
    )  # fmt: skip
    order = kernels.order_queue(rank, credit)
    return Scan(
        queue, order, rank, credit, placed_rank, pick_at, picks, lacks, used, needed, quota_cpus, quota_gpus,
        displacing, holdings,
    )  # fmt: skip


def _cores(cpus_milli: int) -> float:
    """Cores; an int where they are whole, so that sentences read `16` and not `16.0`."""
    return cpus_milli / 1000 if cpus_milli % 1000 else cpus_milli // 1000
