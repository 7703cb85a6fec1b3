"""The GMS scan (MAST 4.2): computes rank and credit of each workload, and sorts the pending workloads.

Here is the fair-share term of the credit (MAST expression 11); `gms.kernels` computes the age term (expression 10).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import fsum

import numpy as np
import numpy.typing as npt

from domain.priority import LOWEST_LEVEL, OVER_QUOTA_RANK, over_quota_rank
from domain.reasons import Reason, ReasonCode
from domain.scheduling import CreditWeights, JobRequest, QueueSnapshot, Ranked, ScanResult, TenantState
from gms import kernels
from gms.columns import UNKNOWN_SIZE, QueueColumns
from gms.queue_order import order_queue


def has_quota(tenant: TenantState) -> bool:
    """Returns whether the tenant has any quota: some GPUs, some CPUs, or unlimited CPUs."""
    cpus = tenant.quota_cpus_milli
    return cpus is None or cpus > 0 or any(slots > 0 for slots in tenant.quota_gpus.values())


def average_share(tenants: Iterable[TenantState]) -> float:
    """Returns the mean windowed share (a fraction of the fleet) of the tenants that have a quota; 0 if there are none.

    The sum is rounded only once (`fsum`), so the order of the tenants does not matter.
    """
    shares = [tenant.window_share for tenant in tenants if has_quota(tenant)]
    return fsum(shares) / len(shares) if shares else 0.0


def fair_credit(weights: CreditWeights, window_share: float, average: float) -> float:
    """Returns the fair-share credit (expression 11): positive below the average share, negative above it.

    If no tenant with a quota used anything (`average` is 0), the credit is 0.
    """
    return 0.0 if average == 0 else weights.w_fair * (1 - window_share / average)


def user_credit(weights: CreditWeights, share: float, average: float) -> float:
    """Returns the credit term for the people of a tenant: from `w_user` without any use down to nearly `-w_user`.

    `average` is the mean share of the people who used anything. If it is 0, nothing does.
    """
    return 0.0 if average == 0 else weights.w_user * (average - share) / (average + share)


SHORT_GPU_S = 8 * 3600.0


def short_credit(weights: CreditWeights, gpu_s: float) -> float:
    """Returns the credit term for small workloads: from `w_short` to 0 (unknown size); half for `SHORT_GPU_S`."""
    return weights.w_short / (1 + gpu_s / SHORT_GPU_S)


def _by_user(queue: QueueColumns, weights: CreditWeights) -> npt.NDArray[np.float64]:
    """Returns `user_credit` by the numbers of users in the queue."""
    shares = [tenant.user_shares for tenant in queue.tenants]
    averages = [fsum(own.values()) / len(own) if own else 0.0 for own in shares]
    people = ((shares[tenant].get(user, 0.0), averages[tenant]) for tenant, user in queue.users)
    return np.array([user_credit(weights, share, average) for share, average in people], np.float64)


UNLIMITED = -1


@dataclass(frozen=True)
class Scan:
    """Result of one scan of a queue, as columns with one entry per row. It is valid until the queue changes."""

    queue: QueueColumns
    order: npt.NDArray[np.int32]
    """Rows of the pending workloads in queue order."""
    places: npt.NDArray[np.int32]
    """Their places (`PendingRanks.taker`)."""
    pending: kernels.PendingRanks
    placed_rank: npt.NDArray[np.int8]
    _placed: kernels.PlacedColumns
    _quota: kernels.TenantAmounts
    _used: kernels.TenantAmounts
    """What all placed and pending workloads within quota use."""
    _terms: kernels.CreditTerms

    def __iter__(self) -> Iterator[Ranked]:
        """Yields the pending workloads that are not held, in queue order."""
        return map(self.ranked, range(len(self.order)))

    def ranked(self, position: int) -> Ranked:
        """Returns the ranking of the workload at a position of the queue."""
        row = int(self.order[position])
        rank = int(self.pending.rank[row])
        over = rank >= OVER_QUOTA_RANK
        columns = self.queue.pending.columns
        level = max(self.queue.tenants[int(columns["tenant"][row])].level, int(columns["requested_level"][row]))
        return Ranked(
            self.queue.pending.name(row),
            rank,
            level,
            over,
            float(self.pending.place_credit[self.places[position]]),
            self._gpu_types(row),
            self._reason(row) if over else None,
            self._displaces(row),
            self._most_tasks.get(row, 0),
        )

    def _gpu_types(self, row: int) -> tuple[tuple[str, ...], ...]:
        """Returns the GPU types on which the jobs of a row may be placed."""
        jobs = self.queue.gangs[int(self.queue.pending.columns["wants"][row])]
        types = tuple(job.gpu_types for job in jobs)
        first = int(self.pending.picks_at[row])
        if first == kernels.NO_PICK or self.pending.rank[row] >= OVER_QUOTA_RANK:
            return types
        picks = self.pending.picks[first : first + len(jobs)]
        return tuple((t[pick],) if job.gpus and t else t for job, t, pick in zip(jobs, types, picks, strict=True))

    def preference(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Returns what the order among the workloads of their tenants and levels adds to the age of these rows."""
        columns = self.queue.pending.columns
        return self._terms.by_user[columns["user"][rows]] + self._terms.by_size[columns["size"][rows]]

    def shortfalls(self, rows: int | npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Returns the `PendingRanks.shortfalls` of over-quota rows, shape (..., 3)."""
        return self.pending.shortfalls[self.pending.picks_at[rows]]

    @cached_property
    def _displacing_at(self) -> dict[int, int]:
        """Maps the row of each pending workload that displaces placed ones to its row in `pending.displacing`."""
        return {row: place for place, row in enumerate(self.pending.displacing[:, 0].tolist())}

    def _displaces(self, row: int) -> tuple[str, ...]:
        place = self._displacing_at.get(row)
        if place is None:
            return ()
        t, used = int(self.queue.pending.columns["tenant"][row]), self.pending.displacing[place, 1:].copy()
        quota = kernels.TenantAmounts(self._quota.cpus[t : t + 1], self._quota.gpus[t : t + 1])
        rows = kernels.displaced(
            t, self.queue.tenants[t].level, int(self.pending.rank[row]), self._placed, self.placed_rank, quota,
            kernels.TenantAmounts(used[:1], used[None, 1:]),
        )  # fmt: skip
        return tuple(sorted(self.queue.placed.name(row) for row in rows.tolist()))

    @cached_property
    def _left(self) -> kernels.TenantAmounts:
        """What workloads within quota leave of it, after the elastic pending ones got what `_most_tasks` says."""
        return kernels.TenantAmounts(self._quota.cpus - self._used.cpus, self._quota.gpus - self._used.gpus)

    def more_tasks(self, tenant: str, job: JobRequest, types: Iterable[str]) -> int:
        """Returns how many more tasks of a placed elastic job fit into its tenant's quota on each of these types."""
        self._most_tasks  # noqa: B018 (elastic pending workloads come first)
        return self._room(self.queue.numbers[tenant], job, types)

    def _room(self, tenant: int, job: JobRequest, types: Iterable[str]) -> int:
        numbers = [self.queue.gangs.types[one] for one in types] if job.gpus_per_task else []
        room = [int(self._left.gpus[tenant, number]) // job.gpus_per_task for number in numbers]
        if job.cpus_milli_per_task and self._quota.cpus[tenant] != UNLIMITED:
            room.append(int(self._left.cpus[tenant]) // job.cpus_milli_per_task)
        return max(0, min((job.most_tasks - job.tasks, *room)))

    @cached_property
    def _most_tasks(self) -> dict[int, int]:
        """Maps the rows of elastic workloads within quota to the most tasks with which all workloads stay within it.

        What the workloads within quota leave of it is given to the elastic ones in queue order.
        """
        queue, found = self.queue, dict[int, int]()
        if not queue.gangs.elastic:
            return found
        columns = queue.pending.columns
        rows = self.order[np.isin(columns["wants"][self.order], queue.gangs.elastic)]
        for row in rows[self.pending.rank[rows] < OVER_QUOTA_RANK].tolist():
            tenant, (job,) = int(columns["tenant"][row]), queue.gangs[int(columns["wants"][row])]
            types = self._gpu_types(row)[0]
            more = self._room(tenant, job, types)
            found[row] = job.tasks + more
            self._left.cpus[tenant] -= more * job.cpus_milli_per_task
            self._left.gpus[tenant, [queue.gangs.types[one] for one in types]] -= more * job.gpus_per_task
        return found

    def _reason(self, row: int) -> Reason:
        tenant = self.queue.tenants[int(self.queue.pending.columns["tenant"][row])]
        lacks, used, needs = self.shortfalls(row).tolist()
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
        """Returns the scan as a `ScanResult`."""
        placed = {self.queue.placed.name(row): int(rank) for row, rank in enumerate(self.placed_rank)}
        return ScanResult(tuple(self), placed)


def scan(snapshot: QueueSnapshot, *, flat: bool = False) -> ScanResult:
    """Ranks all workloads of a snapshot, as `scan_queue` does for columns.

    Raises:
        ValueError: a workload, held or not, names a tenant that is not in the snapshot.
    """
    return scan_queue(QueueColumns.of(snapshot), snapshot.now_s, snapshot.weights, flat=flat).result()


def scan_queue(queue: QueueColumns, now_s: float, weights: CreditWeights, *, flat: bool = False) -> Scan:
    """Ranks all pending and placed workloads.

    A tenant's quota is assigned level by level, the most important level first. The level of a workload is that of its
    tenant, or the requested level if that is less important. Within a level, placed workloads come first (oldest award
    first), then pending workloads (highest credit first). A workload that fits into the remaining quota is counted
    against it, and its rank is its level. Any other workload is over-quota and is not counted, so a later, smaller
    workload may still fit. Its rank is below all levels, and keeps the order of the levels; `flat`: all over-quota
    workloads have one rank (MAST). Tenants affect each other only through the credit.

    Placed workloads are ranked without regard to pending workloads: a placed workload becomes over-quota only when a
    more important workload of its tenant is awarded. A pending workload is checked against the placed workloads of its
    level and of more important levels, and against the pending workloads before it. It can therefore be within quota
    only because less important placed workloads are counted after it. `Ranked.displaces` lists those of them that will
    be over-quota once the pending workload and the pending workloads before it are awarded.

    Until it is placed, a workload that accepts several GPU types counts against all of them: its *envelope*. So the
    within-quota workloads of a tenant never exceed its quota, whichever type RMS chooses. If the envelope exceeds the
    quota, each job in turn is restricted to the first of its types that has quota left after the earlier jobs. If a job
    has no such type, the reason names its most preferred type; otherwise the lacking resource is CPUs.

    A person's use of the tenant's resources, and the size of a workload, change only the order among the workloads of
    one tenant and level: these have certain places in the queue, each with the credit of one of them, and the places
    are given to the workloads by descending credit plus `user_credit` plus `short_credit`. So the order of tenants does
    not depend on who submits their workloads, nor on how long they say that these run.

    A waiting elastic workload counts with its fewest tasks, a placed one with the tasks that it has. If it is
    within quota, `Ranked.most_tasks` is what all workloads within quota leave to it; earlier ones in the queue first.

    Held workloads are neither ranked nor counted. The queue is sorted by rank, descending credit, submission time, id;
    the submission time and id are those of the workload whose place it is.
    """
    tenants = queue.tenants
    types = max(1, len(queue.gangs.types))
    quota_gpus = np.zeros((len(tenants), types), np.int64)
    for number, tenant in enumerate(tenants):
        for gpu_type, slots in tenant.quota_gpus.items():
            if gpu_type in queue.gangs.types:
                quota_gpus[number, queue.gangs.types[gpu_type]] = slots
    limits = [UNLIMITED if t.quota_cpus_milli is None else t.quota_cpus_milli for t in tenants]
    quota = kernels.TenantAmounts(np.array(limits, np.int64), quota_gpus)
    level = np.array([t.level for t in tenants], np.int8)
    over = np.array([over_quota_rank(one, flat=flat) for one in range(LOWEST_LEVEL + 1)], np.int8)
    average = average_share(t for t in tenants if t.name)
    fair = np.array([fair_credit(weights, t.window_share, average) for t in tenants], np.float64)
    by_size = np.array([*(short_credit(weights, 2.0**k) for k in range(UNKNOWN_SIZE)), 0.0])
    terms = kernels.CreditTerms(fair, now_s, weights.w_age, weights.age_cap_s, _by_user(queue, weights), by_size)
    total = kernels.TenantAmounts(np.zeros(len(tenants), np.int64), np.zeros_like(quota_gpus))
    rows = queue.placed.columns
    placed = kernels.PlacedColumns(rows["tenant"], rows["requested_level"], rows["wants"], queue.holdings.held)
    rows = queue.pending.columns
    pending = kernels.PendingColumns(
        rows["tenant"], queue.pending.at_s, rows["requested_level"], rows["held"], rows["wants"], queue.gangs.demand,
        rows["user"], rows["size"],
    )  # fmt: skip
    placed_rank = kernels.walk_placed(placed, level, over, quota, total)
    ranks = kernels.walk_pending(placed, placed_rank, pending, level, over, terms, quota, total)
    places = order_queue(ranks.place_rank, ranks.place_credit)
    return Scan(queue, ranks.taker[places], places, ranks, placed_rank, placed, quota, total, terms)


def _cores(cpus_milli: int) -> float:
    """Converts to cores. A whole number is returned as an int, so that messages show `16` instead of `16.0`."""
    return cpus_milli / 1000 if cpus_milli % 1000 else cpus_milli // 1000
