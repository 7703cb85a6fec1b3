"""Slurm's multifactor priority with EASY backfill, over a federation with one cluster per region.

Priority is the weighted sum of Slurm's factors, each from 0 to 1: age, fair share (Fair Tree with one level of
accounts, the tenants, with shares in proportion to their quotas), size, and the quality of service, which is the
workload's level. The first workload that cannot start gets a reservation for the earliest time at which enough running
workloads will have ended. A later workload may start before, if it ends by then or does not use the reserved machines'
capacity (EASY). There is no preemption, as by Slurm's default. Time limits are the true durations, which users do not
know in advance, so the results are optimistic for Slurm.

`SlurmQos` adds preemption by quality of service (`PreemptType=preempt/qos`, `PreemptMode=REQUEUE`; each quality of
service may preempt all lower ones, the lowest and newest jobs first) and account limits (`GrpTRES`): the running jobs
of a tenant have at most its quota of a GPU type, or as many GPUs as its largest job, so that every job can start. A job
beyond the limit waits, and is not considered for backfill.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from domain.scheduling import Plan
from gms.auction.candidate import Candidate
from research.rivals.rival import Rival
from research.rivals.rooms import ClusterPool, Ints
from simulation.engine import ScanOrder, id_of
from simulation.run import Scenario
from simulation.supply import Machines
from simulation.workloads import SimulatedWorkload

WEIGHT_QOS = 100_000.0
"""Exceeds all other factors together, so that a workload of a higher level always has the higher priority."""
WEIGHT_FAIR_SHARE = 10_000.0
WEIGHT_AGE = 1_000.0
WEIGHT_SIZE = 1_000.0
"""This weight and those of fair share and age are from the example in Slurm's documentation."""
MAX_AGE_S = 7 * 86400.0
HALF_LIFE_S = 7 * 86400.0
"""`PriorityMaxAge` and `PriorityDecayHalfLife` have their default values."""
TESTED = 500
"""`bf_max_job_test`: the number of workloads of the queue that a pass tries to start."""


@dataclass(frozen=True)
class SlurmReservation:
    """The reservation for the first workload that cannot start."""

    pool: ClusterPool
    starts_at_s: float
    kept: Ints
    """The part of the presently free capacity that is reserved, shape (3, machines)."""


class Slurm(Rival):
    """The engine of the policy `slurm`."""

    def __init__(self, scenario: Scenario, machines: Machines) -> None:
        super().__init__(scenario, machines)
        tenants = scenario.tenants
        ordered = list(self.workloads.values())
        self._level = np.array([w.level for w in ordered], np.int64)
        self._submit_s = np.array([w.submit_s for w in ordered])
        total = max(1, sum(m.gpus for states in machines.values() for m in states))
        self._size = np.array([w.gpus / total for w in ordered])
        names = {name: number for number, name in enumerate(sorted(tenants))}
        self._tenant = np.array([names[w.tenant] for w in ordered], np.int64)
        self._share = np.array([max(1, sum(tenants[name].quota_gpus.values())) for name in names], np.float64)
        self._used_gpu_s, self._held_gpus = np.zeros(len(names)), np.zeros(len(names))
        self._used_until_s = 0.0
        self._overhead_s = scenario.settings.provisioning_p99_s
        self._ends_s: dict[str, float] = {}
        self._shadow: SlurmReservation | None = None
        self._has_room = False

    def priority(self, numbers: Ints, now_s: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """Returns the multifactor priorities of workloads, given by number."""
        self._account(now_s)
        by_need = np.argsort(self._used_gpu_s / self._share, kind="stable")
        fair = np.empty(len(by_need))
        fair[by_need] = np.arange(len(by_need), 0, -1) / len(by_need)
        out: np.ndarray[tuple[int], np.dtype[np.float64]] = (
            WEIGHT_QOS * (7 - self._level[numbers]) / 6
            + WEIGHT_FAIR_SHARE * fair[self._tenant[numbers]]
            + WEIGHT_AGE * np.clip((now_s - self._submit_s[numbers]) / MAX_AGE_S, 0, 1)
            + WEIGHT_SIZE * self._size[numbers]
        )
        return out

    def turns(self, standing: ScanOrder) -> Iterator[int]:
        """Yields the first `TESTED` queue positions by priority; skips requests equal to one that did not fit."""
        self._shadow = None
        numbers = standing.order
        order = np.lexsort((numbers, -self.priority(numbers, self.now_s)))[:TESTED]
        refused: set[object] = set()
        for place in order.tolist():
            w = self.workloads[id_of(int(numbers[place]))]
            key = int(standing.gang[place]), w.regions, self.class_of(w)
            if key in refused:
                continue
            self._has_room = True
            yield place
            if not self._has_room:
                refused.add(key)

    def class_of(self, w: SimulatedWorkload) -> object:
        """Returns the class of equal requests: if one has no room, others of the class have none either."""
        return None

    def decide(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Places a workload in the first pool in which it fits and does not delay the reservation; None: it waits."""
        name, job = candidate.request.workload, candidate.request.jobs[0]
        ends_s, shadow = self.now_s + self._limit_s(name), self._shadow
        self._has_room = False
        for pool in self.pools_for(candidate):
            if not pool.fits(job, pool.free):
                continue
            self._has_room = True
            free = pool.free
            if shadow is not None and shadow.pool is pool and ends_s > shadow.starts_at_s:
                free = np.maximum(free - shadow.kept, 0)
            if pool.fits(job, free):
                return pool, pool.plan(name, job, free)
        if shadow is None:
            self._shadow = self._reserve(candidate)
        return None

    def came(self, workload: str) -> None:
        """Records the end of a placed workload's time limit, and adds its GPUs to its tenant's use."""
        self._account(self.now_s)
        self._ends_s[workload] = self.now_s + self._limit_s(workload)
        self._held_gpus[self._tenant[int(workload)]] += self.workloads[workload].gpus

    def gone(self, workload: str) -> None:
        """Subtracts the GPUs of a workload that has ended from its tenant's use."""
        self._held_gpus[self._tenant[int(workload)]] -= self.workloads[workload].gpus
        del self._ends_s[workload]

    def _limit_s(self, workload: str) -> float:
        return self.workloads[workload].duration_s + self._overhead_s

    def _account(self, now_s: float) -> None:
        span_s, self._used_until_s = now_s - self._used_until_s, now_s
        self._used_gpu_s = self._used_gpu_s * 0.5 ** (span_s / HALF_LIFE_S) + self._held_gpus * span_s

    def _reserve(self, candidate: Candidate) -> SlurmReservation | None:
        """Returns the reservation with the earliest start over all pools; ties are broken by the order of pools."""
        found = [shadow for pool in self.pools_for(candidate) for shadow in self._soonest(pool, candidate)]
        return min(found, key=lambda shadow: shadow.starts_at_s, default=None)

    def _soonest(self, pool: ClusterPool, candidate: Candidate) -> Iterator[SlurmReservation]:
        job, free = candidate.request.jobs[0], pool.free.copy()
        holders = [name for name, where in self.placed.items() if where is pool]
        for name in sorted(holders, key=lambda name: (self._ends_s[name], name)):
            free += pool.amounts(pool.ledger.held[name])
            if pool.fits(job, free):
                needs = np.zeros_like(free)
                want = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
                for machine, tasks in pool.plan(name, job, free).jobs[0].machines:
                    needs[:, pool.row[machine]] = [tasks * amount for amount in want]
                kept = np.clip(needs - (free - pool.free), 0, None)
                yield SlurmReservation(pool, max(self.now_s, self._ends_s[name]), kept)
                return


class SlurmQos(Slurm):
    """The engine of the policy `slurm-qos`: preemption by quality of service, and account limits."""

    def __init__(self, scenario: Scenario, machines: Machines) -> None:
        super().__init__(scenario, machines)
        self._limit: dict[tuple[str, str], int] = defaultdict(int)
        """Most slots by tenant and GPU type."""
        for name, tenant in scenario.tenants.items():
            self._limit.update({(name, gpu_type): slots for gpu_type, slots in tenant.quota_gpus.items()})
        for w in self.workloads.values():
            for gpu_type in w.jobs[0].gpu_types:
                self._limit[w.tenant, gpu_type] = max(self._limit[w.tenant, gpu_type], w.gpus)

    def class_of(self, w: SimulatedWorkload) -> object:
        """Returns account and quality of service, on which limit and victims depend."""
        return w.tenant, w.level

    def pools_for(self, candidate: Candidate) -> list[ClusterPool]:
        """Returns the pools that could hold the workload, and of whose GPU type its account may use more."""
        w, pools = self.workloads[candidate.request.workload], super().pools_for(candidate)
        return [pool for pool in pools if not w.gpus or self._allows(w, pool)]

    def decide(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Places a workload as `Slurm` does, else by preemption; None: it waits."""
        shadow, w = self._shadow, self.workloads[candidate.request.workload]
        found = super().decide(candidate)
        if found is None:

            def order(name: str) -> int | None:
                level = self.workloads[name].level
                return -level if level > w.level else None

            job = candidate.request.jobs[0]
            found = self.by_eviction(
                candidate, lambda pool: self.victims(job, pool, self.evictable(pool, w.level, order))
            )
            if found is not None:
                self._shadow, self._has_room = shadow, True
        return found

    def _allows(self, w: SimulatedWorkload, pool: ClusterPool) -> bool:
        gpu_type = pool.gpu_type or ""
        return self.used[w.tenant][gpu_type] + w.gpus <= self._limit[w.tenant, gpu_type]
