"""Kueue: a cluster queue for each tenant, all in one cohort, with borrowing, reclaiming and preemption.

A tenant's quota of a GPU type is the nominal quota of its cluster queue. The rest of the fleet is the nominal quota of
a cluster queue without workloads, which lends it. A workload may use the quota that other queues of the cohort leave
unused.

Each cycle considers the first workload of every queue, in this order: workloads that do not borrow, then higher
priority, then earlier submission. A workload that does not fit may preempt workloads of lower priority in its own
queue. While its queue stays within its nominal quota, it may also preempt workloads of queues that borrow
(`withinClusterQueue: LowerPriority`, `reclaimWithinCohort: Any`, `borrowWithinCohort: Never`). Victims are taken from
other queues first, then by lowest priority, then the newest first. Victims that turn out to be unnecessary are kept
running. With `StrictFIFO`, a workload that does not fit blocks its queue; with `BestEffortFIFO` it does not. A gang is
admitted only if its tasks fit on machines (topology-aware scheduling, one cluster required).
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from domain.scheduling import JobRequest, Plan, RunningWorkload
from gms.auction.candidate import Candidate
from research.rivals.rival import Rival
from research.rivals.rooms import ClusterPool, Ints
from simulation.engine import ScanOrder, id_of
from simulation.hardware import supply
from simulation.run import Scenario
from simulation.supply import Machines
from simulation.workloads import SimulatedWorkload


class Kueue(Rival):
    """The engine of the policies `kueue` and `kueue-best-effort`."""

    def __init__(self, scenario: Scenario, machines: Machines, *, strict: bool) -> None:
        super().__init__(scenario, machines)
        self._strict = strict
        self._nominal = {name: dict(tenant.quota_gpus) for name, tenant in scenario.tenants.items()}
        self._cohort = {
            gpu_type: max(slots, sum(quota.get(gpu_type, 0) for quota in self._nominal.values()))
            for gpu_type, slots in supply(machines).items()
        }
        self._used: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """Used slots by tenant and GPU type, without those of victims that still hold them."""
        self._in_use: dict[str, int] = defaultdict(int)
        """Used slots by GPU type, of all tenants."""
        self._type_of: dict[str, str] = {}
        """GPU type of each workload whose slots count as used."""
        self._admitted_at_s: dict[str, float] = {}
        self._preemptible: dict[object, tuple[list[str], Ints]] = {}
        """Cache of `_preemptible_in`, cleared at each change of the placed workloads."""
        self._won = False

    def turns(self, standing: ScanOrder) -> Iterator[int]:
        """Yields queue positions in cycles, each with the heads of all queues, until no head may be admitted."""
        where = {place: self.workloads[id_of(int(n))] for place, n in enumerate(standing.order.tolist())}
        queues: dict[str, deque[int]] = defaultdict(deque)
        for place, w in sorted(where.items(), key=lambda one: (one[1].level, one[1].submit_s, one[1].id)):
            queues[w.tenant].append(place)
        refused: set[object] = set()
        while queues:
            heads = [(self._borrows(w := where[queue[0]]), w.level, w.submit_s, queue[0]) for queue in queues.values()]
            for _, level, _, place in sorted(heads):
                tenant = where[place].tenant
                alike = tenant, level, int(standing.gang[place]), where[place].regions
                self._won = False
                if alike not in refused:
                    yield place
                if not self._won:
                    refused.add(alike)
                if not self._won and self._strict:
                    del queues[tenant]
                    continue
                queues[tenant].popleft()
                if not queues[tenant]:
                    del queues[tenant]

    def decide(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Places a workload into free capacity that its queue may use, else by preemption; None: it waits."""
        found = self._fitting(candidate) or self._preempting(candidate)
        self._won = found is not None
        if found is not None:
            for victim in found[1].victims:
                self._forget(victim)
        return found

    def came(self, workload: str) -> None:
        """Counts the slots of a placed workload as used by its queue."""
        self._preemptible.clear()
        self._admitted_at_s[workload] = self.now_s
        w, gpu_type = self.workloads[workload], self.placed[workload].gpu_type
        if w.gpus and gpu_type is not None:
            self._type_of[workload] = gpu_type
            self._used[w.tenant][gpu_type] += w.gpus
            self._in_use[gpu_type] += w.gpus

    def running(self, region: str, workload: RunningWorkload) -> None:
        """Makes a workload preemptible: it holds all its slots."""
        if workload.id not in self.working:
            self._preemptible.clear()
        super().running(region, workload)

    def gone(self, workload: str) -> None:
        """Removes a workload that has ended, or has left after its preemption."""
        self._forget(workload)
        del self._admitted_at_s[workload]

    def _forget(self, workload: str) -> None:
        """Subtracts the slots of a workload from the used ones, unless they were subtracted already."""
        self._preemptible.clear()
        gpu_type, w = self._type_of.pop(workload, None), self.workloads[workload]
        if gpu_type is not None:
            self._used[w.tenant][gpu_type] -= w.gpus
            self._in_use[gpu_type] -= w.gpus

    # ------------------------------------------------------------------------------------------------------------ quota

    def _over_nominal(self, tenant: str, gpu_type: str | None, more: int) -> bool:
        """Returns whether a queue would borrow if it used `more` additional slots."""
        if gpu_type is None or not more:
            return False
        return self._used[tenant][gpu_type] + more > self._nominal[tenant].get(gpu_type, 0)

    def _within_cohort(self, gpu_type: str | None, more: int) -> bool:
        """Returns whether the cohort has `more` unused slots; `more` may be negative."""
        return gpu_type is None or more <= 0 or self._in_use[gpu_type] + more <= self._cohort[gpu_type]

    def _borrows(self, w: SimulatedWorkload) -> bool:
        """Returns whether the workload's queue would have to borrow for each GPU type that the workload accepts."""
        types = w.jobs[0].gpu_types if w.gpus else ()
        return bool(types) and all(self._over_nominal(w.tenant, gpu_type, w.gpus) for gpu_type in types)

    # ------------------------------------------------------------------------------------------------------------ plans

    def _fitting(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Returns the first pool (by region) with free capacity whose GPU type has unused slots in the cohort."""
        w, job = self.workloads[candidate.request.workload], candidate.request.jobs[0]
        for pool in self.pools_for(candidate):
            if self._within_cohort(pool.gpu_type, w.gpus) and pool.fits(job, pool.free):
                return pool, pool.plan(candidate.request.workload, job, pool.free)
        return None

    def _preempting(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Returns the pool and plan with the fewest victims; ties are broken by the order of pools."""
        found: tuple[ClusterPool, Plan] | None = None
        for pool in self.pools_for(candidate):
            victims = self._victims(candidate, pool)
            if victims and (found is None or len(victims) < len(found[1].victims)):
                free = pool.free + sum(pool.amounts(pool.ledger.held[victim]) for victim in victims)
                found = pool, pool.plan(candidate.request.workload, candidate.request.jobs[0], free, sorted(victims))
        return found

    def _victims(self, candidate: Candidate, pool: ClusterPool) -> list[str]:
        """Returns a minimal set of victims in a pool; empty if preempting all preemptible workloads is not enough."""
        w, job = self.workloads[candidate.request.workload], candidate.request.jobs[0]
        preemptible, theirs = self._preemptible_in(pool, w)
        if not preemptible or not pool.fits(job, pool.free + theirs):
            return []
        free, chosen = pool.free.copy(), list[str]()
        for victim in preemptible:
            if self._given(chosen, self.workloads[victim].tenant) < self._reclaimable(victim, w, pool.gpu_type):
                chosen.append(victim)
                free += pool.amounts(pool.ledger.held[victim])
                if self._enough(w, job, pool, free, chosen):
                    break
        else:
            return []
        for victim in chosen[-2::-1]:
            rest = [one for one in chosen if one != victim]
            less = free - pool.amounts(pool.ledger.held[victim])
            if self._enough(w, job, pool, less, rest):
                chosen, free = rest, less
        return chosen

    def _preemptible_in(self, pool: ClusterPool, w: SimulatedWorkload) -> tuple[list[str], Ints]:
        """Returns the workloads of a pool that `w` may preempt, and the sum of their holdings, shape (3, machines).

        Workloads of other queues come first; then the order is lowest priority first, then newest first.
        """
        reclaims = w.gpus > 0 and not self._over_nominal(w.tenant, pool.gpu_type, w.gpus)
        key = pool, w.tenant, w.level, reclaims
        if key not in self._preemptible:
            names = self._sorted_preemptible(pool, w, reclaims)
            theirs = np.zeros_like(pool.free)
            for name in names:
                theirs += pool.amounts(pool.ledger.held[name])
            self._preemptible[key] = names, theirs
        return self._preemptible[key]

    def _sorted_preemptible(self, pool: ClusterPool, w: SimulatedWorkload, reclaims: bool) -> list[str]:
        found = []
        for name, where in self.placed.items():
            other = self.workloads[name]
            own = other.tenant == w.tenant
            if where is not pool or name not in self.working or name in self.leaving:
                continue
            if other.level > w.level if own else reclaims and other.gpus > 0:
                found.append((own, -other.level, -self._admitted_at_s[name], name))
        return [name for *_, name in sorted(found)]

    def _reclaimable(self, victim: str, w: SimulatedWorkload, gpu_type: str | None) -> float:
        """Returns how many slots `w` may take from a victim's queue: those it borrows; no limit in its own queue."""
        tenant = self.workloads[victim].tenant
        if tenant == w.tenant or gpu_type is None:
            return inf
        return self._used[tenant][gpu_type] - self._nominal[tenant].get(gpu_type, 0)

    def _given(self, victims: Sequence[str], tenant: str) -> int:
        return sum(self.workloads[victim].gpus for victim in victims if self.workloads[victim].tenant == tenant)

    def _enough(
        self, w: SimulatedWorkload, job: JobRequest, pool: ClusterPool, free: Ints, victims: Sequence[str]
    ) -> bool:
        """Returns whether a workload fits into `free` and into the cohort's quota once the victims have left."""
        given = sum(self.workloads[victim].gpus for victim in victims)
        return pool.fits(job, free) and self._within_cohort(pool.gpu_type, w.gpus - given)
