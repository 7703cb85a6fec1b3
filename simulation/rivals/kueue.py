"""Kueue: a cluster queue for each tenant, all in one cohort, with borrowing, reclaiming and preemption.

Each tenant's quota of a GPU type is the nominal quota of its cluster queue; a cluster queue without workloads owns what
is left of the fleet, and lends it. A workload may run on what other queues of the cohort do not use.

Each cycle considers the first workload of every queue, in this order: those that need not borrow, then higher
priority, then earlier submission. A workload that does not fit may preempt workloads of lower priority in its own
queue. While its queue stays within its nominal quota, it may also preempt workloads of queues that borrow
(`withinClusterQueue: LowerPriority`, `reclaimWithinCohort: Any`, `borrowWithinCohort: Never`). Victims are taken from
other queues first, then by lowest priority, then the newest first; those that turn out not to be needed are kept.
With `StrictFIFO` a first workload that waits blocks its queue; with `BestEffortFIFO` it does not. A gang is admitted
only where its tasks fit on machines (topology-aware scheduling, one cluster required).
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import numpy as np

from auction.candidate import Candidate
from domain.scheduling import CreditWeights, JobRequest, MachineState, Plan, RunningWorkload, TenantState
from simulation.engine import Standing, id_of
from simulation.fleet import supply
from simulation.rivals.rival import Rival
from simulation.rivals.rooms import Ints, Pool
from simulation.workloads import Workload


class Kueue(Rival):
    """The engine of the policies `kueue` and `kueue-best-effort`."""

    def __init__(
        self,
        machines: Mapping[str, tuple[MachineState, ...]],
        weights: CreditWeights,
        workloads: Sequence[Workload],
        tenants: Mapping[str, TenantState],
        strict: bool,
    ) -> None:
        super().__init__(machines, weights, workloads)
        self._strict = strict
        self._nominal = {name: dict(tenant.quota_gpus) for name, tenant in tenants.items()}
        self._cohort = {
            gpu_type: max(slots, sum(quota.get(gpu_type, 0) for quota in self._nominal.values()))
            for gpu_type, slots in supply(machines).items()
        }
        self._used: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """Slots by tenant and GPU type; those of victims on their way out count no more."""
        self._in_use: dict[str, int] = defaultdict(int)
        """Slots by GPU type, of all tenants."""
        self._type_of: dict[str, str] = {}
        """The GPU type of each workload that counts."""
        self._admitted_at_s: dict[str, float] = {}
        self._preemptible: dict[object, tuple[list[str], Ints]] = {}
        """What `_preemptible_in` found since something changed."""
        self._won = False

    def turns(self, standing: Standing) -> Iterator[int]:
        """Cycle after cycle, each with the heads of all queues, until no queue has a head that may be admitted."""
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

    def decide(self, candidate: Candidate) -> tuple[Pool, Plan] | None:
        """Into room that its queue may use, else by preemption, else it waits."""
        found = self._fitting(candidate) or self._preempting(candidate)
        self._won = found is not None
        if found is not None:
            for victim in found[1].victims:
                self._forget(victim)
        return found

    def came(self, workload: str) -> None:
        """Its queue uses its slots."""
        self._preemptible.clear()
        self._admitted_at_s[workload] = self.now_s
        w, gpu_type = self.workloads[workload], self.placed[workload].gpu_type
        if w.gpus and gpu_type is not None:
            self._type_of[workload] = gpu_type
            self._used[w.tenant][gpu_type] += w.gpus
            self._in_use[gpu_type] += w.gpus

    def running(self, region: str, workload: RunningWorkload) -> None:
        """From now on it may be preempted."""
        if workload.id not in self.working:
            self._preemptible.clear()
        super().running(region, workload)

    def gone(self, workload: str) -> None:
        """It ended, or is out after its preemption."""
        self._forget(workload)
        del self._admitted_at_s[workload]

    def _forget(self, workload: str) -> None:
        """Its queue uses its slots no more, if that was not said before."""
        self._preemptible.clear()
        gpu_type, w = self._type_of.pop(workload, None), self.workloads[workload]
        if gpu_type is not None:
            self._used[w.tenant][gpu_type] -= w.gpus
            self._in_use[gpu_type] -= w.gpus

    # ------------------------------------------------------------------------------------------------------------ quota

    def _over_nominal(self, tenant: str, gpu_type: str | None, more: int) -> bool:
        """Whether a queue with so many slots more would borrow."""
        if gpu_type is None or not more:
            return False
        return self._used[tenant][gpu_type] + more > self._nominal[tenant].get(gpu_type, 0)

    def _within_cohort(self, gpu_type: str | None, more: int) -> bool:
        """Whether the cohort has so many slots more; `more` may be below 0."""
        return gpu_type is None or more <= 0 or self._in_use[gpu_type] + more <= self._cohort[gpu_type]

    def _borrows(self, w: Workload) -> bool:
        """Whether its queue would have to borrow on every type that it may run on."""
        types = w.jobs[0].gpu_types if w.gpus else ()
        return bool(types) and all(self._over_nominal(w.tenant, gpu_type, w.gpus) for gpu_type in types)

    # ------------------------------------------------------------------------------------------------------------ plans

    def _fitting(self, candidate: Candidate) -> tuple[Pool, Plan] | None:
        """The first pool with room, in the order of regions, of a type that the cohort has slots of."""
        w, job = self.workloads[candidate.request.workload], candidate.request.jobs[0]
        for pool in self.pools_for(candidate):
            if self._within_cohort(pool.gpu_type, w.gpus) and pool.fits(job, pool.free):
                return pool, pool.plan(candidate.request.workload, job, pool.free)
        return None

    def _preempting(self, candidate: Candidate) -> tuple[Pool, Plan] | None:
        """The pool with the fewest victims, of equal ones the first by name."""
        found: tuple[Pool, Plan] | None = None
        for pool in self.pools_for(candidate):
            victims = self._victims(candidate, pool)
            if victims and (found is None or len(victims) < len(found[1].victims)):
                free = pool.free + sum(pool.amounts(pool.ledger.held[victim]) for victim in victims)
                found = pool, pool.plan(candidate.request.workload, candidate.request.jobs[0], free, sorted(victims))
        return found

    def _victims(self, candidate: Candidate, pool: Pool) -> list[str]:
        """Enough of the preemptible in a pool, and none that is needless; empty: all of them are not enough."""
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

    def _preemptible_in(self, pool: Pool, w: Workload) -> tuple[list[str], Ints]:
        """Those whom a workload may preempt, and what they hold in all, shape (3, machines).

        Of other queues first, then by lowest priority, then the newest.
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

    def _sorted_preemptible(self, pool: Pool, w: Workload, reclaims: bool) -> list[str]:
        found = []
        for name, where in self.placed.items():
            other = self.workloads[name]
            own = other.tenant == w.tenant
            if where is not pool or name not in self.working or name in self.leaving:
                continue
            if other.level > w.level if own else reclaims and other.gpus > 0:
                found.append((own, -other.level, -self._admitted_at_s[name], name))
        return [name for *_, name in sorted(found)]

    def _reclaimable(self, victim: str, w: Workload, gpu_type: str | None) -> float:
        """How many slots a victim's queue may be made to give: what it borrows; the workload's own queue, any."""
        tenant = self.workloads[victim].tenant
        if tenant == w.tenant or gpu_type is None:
            return inf
        return self._used[tenant][gpu_type] - self._nominal[tenant].get(gpu_type, 0)

    def _given(self, victims: Sequence[str], tenant: str) -> int:
        return sum(self.workloads[victim].gpus for victim in victims if self.workloads[victim].tenant == tenant)

    def _enough(self, w: Workload, job: JobRequest, pool: Pool, free: Ints, victims: Sequence[str]) -> bool:
        """Whether a workload fits where these have left, and the cohort has its slots then."""
        given = sum(self.workloads[victim].gpus for victim in victims)
        return pool.fits(job, free) and self._within_cohort(pool.gpu_type, w.gpus - given)
