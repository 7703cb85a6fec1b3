"""Schedulers with a queue for each tenant and fair shares between queues: KAI and Volcano.

Every pass divides the slots of each GPU type between the tenants that use or request them, and serves the queue with
the lowest ratio of used slots to its share, workload by workload; within a queue higher priority, then earlier
submission. A workload that does not fit does not block others. If it does not fit, it may evict workloads of other
queues (reclaim), or workloads of lower priority of its own queue (preempt). Gangs are placed and evicted as a whole.

**KAI** (`docs/fairness` of its repository): the share is the deserved quota, as far as it is requested, plus equal
parts of the surplus. A queue has no limit. A queue that stays within its share reclaims from queues above theirs (fair
share reclaim), and one that stays within its quota from queues above theirs (quota reclaim), as long as its ratio of
used slots to share stays at most that of the other queue. Victims are taken from the queue with the largest ratio, the
lowest priority and the newest first. All workloads are preemptible; there is no minimum runtime, which is the default,
and no consolidation.

**Volcano** (plugins `priority`, `gang`, `proportion`, with the actions `allocate`, `preempt` and `reclaim`): the
deserved share is in proportion to the weight, here the quota, as far as it is requested. A queue that uses its share or
more gets nothing. A queue below its share reclaims from others as long as these keep theirs.
"""

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

from domain.scheduling import Plan
from gms.auction.candidate import Candidate
from research.rivals.rival import Given, Rival
from research.rivals.rooms import ClusterPool
from simulation.engine import ScanOrder, id_of
from simulation.hardware import supply
from simulation.run import Scenario
from simulation.supply import Machines
from simulation.workloads import SimulatedWorkload

_LEAST = 1e-9


class FairQueues(Rival):
    """A queue for each tenant; see above."""

    def __init__(self, scenario: Scenario, machines: Machines) -> None:
        super().__init__(scenario, machines)
        self.quota = {name: dict(tenant.quota_gpus) for name, tenant in scenario.tenants.items()}
        self.share: dict[str, dict[str, float]] = {}
        """Slots by GPU type and tenant, as the last pass has divided them."""
        self._supply = supply(machines)
        self._won = False

    @abstractmethod
    def divide(self, gpu_type: str, slots: int, requested: Mapping[str, float]) -> dict[str, float]:
        """Returns the tenants' shares of a GPU type. `requested`: what they use and request together."""

    @abstractmethod
    def may_use(self, w: SimulatedWorkload, gpu_type: str) -> bool:
        """Returns whether a workload's queue may get more slots of a GPU type."""

    @abstractmethod
    def may_reclaim(self, to: str, gpus: int, gpu_type: str, tenant: str, given: int = 0, victim: int = 0) -> bool:
        """Returns whether a workload of the queue `to` with some GPUs may reclaim from another tenant's queue.

        `given`: slots that the other queue has given already; `victim`: slots of its next victim. With more of them, a
        workload may not reclaim more.
        """

    def ratio(self, tenant: str, gpu_type: str, more: int = 0) -> float:
        """Returns used slots over the share, with `more` additional slots."""
        return (self.used[tenant][gpu_type] + more) / max(_LEAST, self.share.get(gpu_type, {}).get(tenant, 0.0))

    def turns(self, standing: ScanOrder) -> Iterator[int]:
        """Yields queue positions: always the next workload of the queue with the lowest ratio."""
        where = {place: self.workloads[id_of(int(n))] for place, n in enumerate(standing.order.tolist())}
        self._evictable.clear()
        self._divide(where.values())
        queues: dict[str, deque[int]] = defaultdict(deque)
        for place, w in sorted(where.items(), key=lambda one: (one[1].level, one[1].submit_s, one[1].id)):
            queues[w.tenant].append(place)
        refused: set[object] = set()
        while queues:
            tenant = min(queues, key=lambda tenant: (self._lowest(where[queues[tenant][0]]), tenant))
            place = queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            alike = tenant, where[place].level, int(standing.gang[place]), where[place].regions
            if alike not in refused:
                self._won = False
                yield place
                if not self._won:
                    refused.add(alike)

    def decide(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Places a workload into free capacity, else by reclaim, else by preemption; None: it waits."""
        w, job = self.workloads[candidate.request.workload], candidate.request.jobs[0]

        def lower(name: str) -> int | None:
            other = self.workloads[name]
            return -other.level if other.tenant == w.tenant and other.level > w.level else None

        found = (
            self.in_free_room(candidate, lambda pool: self._allows(w, pool))
            or (self.by_eviction(candidate, lambda pool: self._reclaimed(candidate, pool)) if w.gpus else None)
            or self.by_eviction(
                candidate, lambda pool: self.victims(job, pool, self.evictable(pool, (w.tenant, w.level), lower))
            )
        )
        self._won = found is not None
        return found

    def _reclaimed(self, candidate: Candidate, pool: ClusterPool) -> list[str]:
        w, gpu_type = self.workloads[candidate.request.workload], pool.gpu_type
        if gpu_type is None or not self._allows(w, pool):
            return []
        gpus = w.gpus
        tenants = {one for one in self.quota if one != w.tenant and self.may_reclaim(w.tenant, gpus, gpu_type, one)}
        if not tenants:
            return []

        def order(name: str) -> tuple[float, int] | None:
            other = self.workloads[name]
            may = other.tenant in tenants and self.gpus[name]
            return (-self.ratio(other.tenant, gpu_type), -other.level) if may else None

        def may_take(given: Given, victim: str) -> bool:
            tenant = self.workloads[victim].tenant
            return self.may_reclaim(w.tenant, gpus, gpu_type, tenant, given[tenant], self.gpus[victim])

        among = self.evictable(pool, frozenset(tenants), order)
        return self.victims(candidate.request.jobs[0], pool, among, may_take)

    def _allows(self, w: SimulatedWorkload, pool: ClusterPool) -> bool:
        return not w.gpus or pool.gpu_type is None or self.may_use(w, pool.gpu_type)

    def _lowest(self, w: SimulatedWorkload) -> float:
        """Returns the lowest ratio of a workload's queue over the GPU types that the workload accepts."""
        return min((self.ratio(w.tenant, gpu_type) for gpu_type in w.jobs[0].gpu_types if w.gpus), default=0.0)

    def _divide(self, pending: Iterable[SimulatedWorkload]) -> None:
        requested: dict[str, dict[str, float]] = {
            gpu_type: {tenant: float(self.used[tenant][gpu_type]) for tenant in self.quota} for gpu_type in self._supply
        }
        for w in pending:
            for gpu_type in w.jobs[0].gpu_types if w.gpus else ():
                if gpu_type in requested:
                    requested[gpu_type][w.tenant] += w.gpus
        self.share = {
            gpu_type: self.divide(gpu_type, slots, requested[gpu_type]) for gpu_type, slots in self._supply.items()
        }


class Kai(FairQueues):
    """The engine of the policy `kai`."""

    def divide(self, gpu_type: str, slots: int, requested: Mapping[str, float]) -> dict[str, float]:
        """Returns the quotas as far as they are requested, and equal parts of the surplus."""
        own = {tenant: min(self.quota[tenant].get(gpu_type, 0), most) for tenant, most in requested.items()}
        rest = {tenant: requested[tenant] - own[tenant] for tenant in own}
        more = filled(slots - sum(own.values()), dict.fromkeys(own, 1.0), rest)
        return {tenant: own[tenant] + more[tenant] for tenant in own}

    def may_use(self, w: SimulatedWorkload, gpu_type: str) -> bool:
        """Returns True: queues have no limit."""
        return True

    def may_reclaim(self, to: str, gpus: int, gpu_type: str, tenant: str, given: int = 0, victim: int = 0) -> bool:
        """Returns whether the queue stays within its share (or quota), and the other one is above its own."""
        share, quota = self.share[gpu_type], self.quota
        mine, theirs = self.used[to][gpu_type] + gpus, self.used[tenant][gpu_type] - given
        fair = mine <= share[to] and theirs > share[tenant]
        by_quota = mine <= quota[to].get(gpu_type, 0) and theirs > quota[tenant].get(gpu_type, 0)
        return (fair or by_quota) and self.ratio(to, gpu_type, gpus) <= self.ratio(tenant, gpu_type, -given)


class Volcano(FairQueues):
    """The engine of the policy `volcano`."""

    def divide(self, gpu_type: str, slots: int, requested: Mapping[str, float]) -> dict[str, float]:
        """Returns shares in proportion to the quotas, as far as they are requested."""
        return filled(slots, {tenant: max(1.0, self.quota[tenant].get(gpu_type, 0)) for tenant in requested}, requested)

    def may_use(self, w: SimulatedWorkload, gpu_type: str) -> bool:
        """Returns whether the queue uses less than its share."""
        return self.used[w.tenant][gpu_type] < self.share[gpu_type][w.tenant]

    def may_reclaim(self, to: str, gpus: int, gpu_type: str, tenant: str, given: int = 0, victim: int = 0) -> bool:
        """Returns whether the other queue keeps its share without the victim."""
        return self.used[tenant][gpu_type] - given - victim >= self.share[gpu_type][tenant]


def filled(slots: float, weights: Mapping[str, float], most: Mapping[str, float]) -> dict[str, float]:
    """Divides slots in proportion to weights, at most `most` each; what one does not take goes to the others."""
    out = dict.fromkeys(weights, 0.0)
    left = {name for name in weights if most[name] > 0}
    while left and slots > _LEAST:
        unit = slots / sum(weights[name] for name in left)
        full = {name for name in left if most[name] <= weights[name] * unit + _LEAST}
        if not full:
            out.update({name: weights[name] * unit for name in left})
            break
        for name in full:
            out[name] = most[name]
            slots -= most[name]
        left -= full
    return out
