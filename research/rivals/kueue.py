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

With fair sharing, the queue with the lowest share is served first; its share is the part of the cohort's slots that it
borrows (the dominant resource share, all weights 1). A workload may then preempt workloads of another queue that
borrows, if its own queue's share with it is at most the other's share without the victim
(`LessThanOrEqualToFinalShare`) or, if that is not enough, less than the other's present share
(`LessThanInitialShare`); the queue with the largest share loses first.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial

from domain.scheduling import Plan
from gms.auction.candidate import Candidate
from research.rivals.rival import Given, Rival
from research.rivals.rooms import ClusterPool
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
        self._won = False

    def turns(self, standing: ScanOrder) -> Iterator[int]:
        """Yields queue positions in cycles, each with the heads of all queues, until no head may be admitted."""
        where = {place: self.workloads[id_of(int(n))] for place, n in enumerate(standing.order.tolist())}
        queues: dict[str, deque[int]] = defaultdict(deque)
        for place, w in sorted(where.items(), key=lambda one: (one[1].level, one[1].submit_s, one[1].id)):
            queues[w.tenant].append(place)
        refused: set[object] = set()
        while queues:
            heads = [(self.turn_of(w := where[queue[0]]), w.level, w.submit_s, queue[0]) for queue in queues.values()]
            for *_, place in sorted(heads):
                tenant = where[place].tenant
                alike = tenant, where[place].level, int(standing.gang[place]), where[place].regions
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
        gpus = self.workloads[candidate.request.workload].gpus
        found = self.in_free_room(candidate, lambda pool: self._within_cohort(pool.gpu_type, gpus)) or self.by_eviction(
            candidate, partial(self.victims_in, candidate)
        )
        self._won = found is not None
        return found

    # ------------------------------------------------------------------------------------------------------------ quota

    def _over_nominal(self, tenant: str, gpu_type: str | None, more: int) -> bool:
        """Returns whether a queue would borrow if it used `more` additional slots."""
        return gpu_type is not None and self.used[tenant][gpu_type] + more > self._nominal[tenant].get(gpu_type, 0)

    def _within_cohort(self, gpu_type: str | None, more: int) -> bool:
        """Returns whether the cohort has `more` unused slots; `more` may be negative."""
        if gpu_type is None or more <= 0:
            return True
        return sum(used[gpu_type] for used in self.used.values()) + more <= self._cohort[gpu_type]

    def turn_of(self, w: SimulatedWorkload) -> float:
        """Returns 1 if the workload's queue would borrow for each GPU type that it accepts, else 0, which is first."""
        types = w.jobs[0].gpu_types if w.gpus else ()
        return float(bool(types) and all(self._over_nominal(w.tenant, gpu_type, w.gpus) for gpu_type in types))

    # ------------------------------------------------------------------------------------------------------------ plans

    def victims_in(self, candidate: Candidate, pool: ClusterPool) -> list[str]:
        """Returns a minimal set of victims in a pool; empty: preempting all preemptible workloads is not enough."""
        w = self.workloads[candidate.request.workload]
        reclaims = w.gpus > 0 and not self._over_nominal(w.tenant, pool.gpu_type, w.gpus)

        def order(name: str) -> tuple[bool, int] | None:
            """Other queues come first, then the lowest priority."""
            other = self.workloads[name]
            own = other.tenant == w.tenant
            may = other.level > w.level if own else reclaims and self._over_nominal(other.tenant, pool.gpu_type, 0)
            return (own, -other.level) if may else None

        def may_take(given: Given, victim: str) -> bool:
            """From other queues, only what they borrow is taken."""
            tenant = self.workloads[victim].tenant
            if tenant == w.tenant or pool.gpu_type is None:
                return True
            return self._over_nominal(tenant, pool.gpu_type, -given[tenant])

        among = self.evictable(pool, (w.tenant, w.level, reclaims), order)
        return self.victims(candidate.request.jobs[0], pool, among, may_take, self.room_for(w, pool))

    def room_for(self, w: SimulatedWorkload, pool: ClusterPool) -> Callable[[Given], bool]:
        """Returns a function that tells whether the cohort has quota for a workload once victims have left."""
        gpus = w.gpus
        return lambda given: self._within_cohort(pool.gpu_type, gpus - given.total())


class KueueFair(Kueue):
    """The engine of the policy `kueue-fair`: fair sharing."""

    def __init__(self, scenario: Scenario, machines: Machines) -> None:
        super().__init__(scenario, machines, strict=False)

    def turn_of(self, w: SimulatedWorkload) -> float:
        """Returns the share that the workload's queue would have with it; the lowest is served first."""
        return min((self._share(w.tenant, gpu_type, w.gpus) for gpu_type in w.jobs[0].gpu_types if w.gpus), default=0.0)

    def victims_in(self, candidate: Candidate, pool: ClusterPool) -> list[str]:
        """Returns a minimal set of victims by the first of the two strategies with which the workload fits."""
        w, gpu_type = self.workloads[candidate.request.workload], pool.gpu_type
        if gpu_type is None or not w.gpus:
            return super().victims_in(candidate, pool)

        def order(name: str) -> tuple[float, int] | None:
            """The queue with the largest share comes first, then the lowest priority."""
            other = self.workloads[name]
            share = self._share(other.tenant, gpu_type, 0)
            may = other.level > w.level if other.tenant == w.tenant else share > 0 and self.gpus[name] > 0
            return (-share, -other.level) if may else None

        gpus = w.gpus

        def may_take(given: Given, victim: str, *, initial: bool) -> bool:
            other = self.workloads[victim]
            if other.tenant == w.tenant:
                return True
            mine = self._share(w.tenant, gpu_type, gpus - given[w.tenant])
            before = self._share(other.tenant, gpu_type, -given[other.tenant])
            if initial or not before:
                return mine < before
            return mine <= self._share(other.tenant, gpu_type, -given[other.tenant] - self.gpus[victim])

        among, job = self.evictable(pool, (w.tenant, w.level), order), candidate.request.jobs[0]
        enough = self.room_for(w, pool)
        return self.victims(job, pool, among, partial(may_take, initial=False), enough) or self.victims(
            job, pool, among, partial(may_take, initial=True), enough
        )

    def _share(self, tenant: str, gpu_type: str, more: int) -> float:
        """Returns the share of the cohort's slots that a queue would borrow if it got `more` additional slots."""
        borrowed = self.used[tenant][gpu_type] + more - self._nominal[tenant].get(gpu_type, 0)
        return max(0, borrowed) / self._cohort[gpu_type]
