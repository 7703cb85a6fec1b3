"""The base class of the models: ledgers, placed workloads, victims, and one decision at a time."""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from domain.scheduling import Bid, JobRequest, MachineState, Plan, RunningWorkload
from gms.auction.candidate import AuctionOutcome, Candidate
from research.rivals.rooms import ClusterPool, Ints, pools_of
from simulation.engine import DecisionCounts, Ranks, ScanOrder
from simulation.errors import SimulationError
from simulation.ledger import Ledger
from simulation.run import Scenario, credit_weights
from simulation.supply import Machines
from simulation.workload_state import numbered

Given = Counter[str]
"""Slots that the victims chosen so far release, by tenant."""


class Rival(Ranks, ABC):
    """A scheduler with its own queue order and placement.

    MAST's scan is used only to classify workloads as within or over quota, so that figures are comparable.

    Raises:
        SimulationError: a workload has several jobs, which the models do not support.
    """

    def __init__(self, scenario: Scenario, machines: Machines) -> None:
        super().__init__(credit_weights(scenario.settings))
        self.workloads = {life.id: life.workload for life in numbered(scenario.workloads)}
        several = next((w.id for w in scenario.workloads if len(w.jobs) > 1), None)
        if several is not None:
            raise SimulationError(
                f"workload {several}: has several jobs; models of other schedulers support only one job"
            )
        self.ledgers = {region: Ledger(states) for region, states in sorted(machines.items())}
        self.gpus = {name: w.gpus for name, w in self.workloads.items()}
        """Slots by workload id."""
        self.pools = pools_of(self.ledgers)
        self.placed: dict[str, ClusterPool] = {}
        """Pool in which a workload holds slots, by workload id."""
        self.leaving: set[str] = set()
        """Victims that still hold their slots."""
        self.working: set[str] = set()
        """Workloads that hold all slots of their award."""
        self.placed_at_s: dict[str, float] = {}
        self.used: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """Used slots by tenant and GPU type, without those of victims that still hold them."""
        self.now_s = 0.0
        self._type_of: dict[str, str] = {}
        """GPU type of each workload whose slots count as used."""
        self._evictable: dict[object, tuple[list[str], Ints]] = {}
        """Cache of `evictable`, cleared at each change of the placed workloads."""
        self._counts = DecisionCounts()
        self._candidate_pools: dict[tuple[JobRequest, frozenset[str] | None], list[ClusterPool]] = {}

    def open(self, now_s: float) -> None:
        """Begins a pass over the queue."""
        self.now_s = now_s

    def place(self, candidates: Sequence[Candidate]) -> Sequence[AuctionOutcome]:
        """Decides on one candidate after another, and awards the plans."""
        return [self._place(candidate) for candidate in candidates]

    def running(self, region: str, workload: RunningWorkload) -> None:
        """Records a workload that holds all slots of its award, or that held slots when the simulation began."""
        ledger = self.ledgers[region]
        if workload.id not in ledger.held:
            ledger.hold(workload.id, workload.holdings, taken=True)
            self._now_in(workload.id, next(p for p in self.pools[region] if workload.holdings[0].machine in p.row))
        if workload.id not in self.working:
            self._evictable.clear()
            self.working.add(workload.id)

    def leave(self, region: str, workload: str) -> None:
        """Releases all resources that a workload holds: its evictor gets what it is owed, and the rest becomes free."""
        ledger = self.ledgers[region]
        machines = list(ledger.held[workload])
        ledger.leave(workload)
        self._uncount(workload)
        self.placed.pop(workload).refresh(machines)
        del self.placed_at_s[workload]
        self.leaving.discard(workload)
        self.working.discard(workload)
        self.gone(workload)

    def join(self, region: str, machine: MachineState) -> None:
        """Not supported: the machines of these schedulers are fixed (`check_policy` rejects pools)."""
        raise SimulationError(f"{region}: machine {machine.id}: models of other schedulers do not support pools")

    def close(self, region: str, machine: str) -> None:
        """Not supported, as `join`."""
        raise SimulationError(f"{region}: machine {machine}: models of other schedulers do not support pools")

    def counts(self) -> DecisionCounts:
        """Returns the counts of decisions so far."""
        return self._counts

    @abstractmethod
    def turns(self, standing: ScanOrder) -> Iterator[int]:
        """Yields queue positions in the order in which the workloads are to be decided on."""

    @abstractmethod
    def decide(self, candidate: Candidate) -> tuple[ClusterPool, Plan] | None:
        """Returns the pool and plan for a workload; None: the workload waits."""

    def came(self, workload: str) -> None:
        """Is called after a workload was placed."""

    def gone(self, workload: str) -> None:
        """Is called after a workload has released all its slots."""

    def pools_for(self, candidate: Candidate) -> list[ClusterPool]:
        """Returns the pools in the workload's allowed regions that could hold it if they were empty."""
        key = candidate.request.jobs[0], candidate.regions
        if key not in self._candidate_pools:
            self._candidate_pools[key] = [
                pool
                for region, pools in self.pools.items()
                if candidate.may_run_in(region)
                for pool in pools
                if pool.could_hold(key[0])
            ]
        return self._candidate_pools[key]

    def in_free_room(
        self, candidate: Candidate, allows: Callable[[ClusterPool], bool]
    ) -> tuple[ClusterPool, Plan] | None:
        """Returns the first allowed pool (by region) in whose free capacity a workload fits, and the plan."""
        job = candidate.request.jobs[0]
        for pool in self.pools_for(candidate):
            if allows(pool) and pool.fits(job, pool.free):
                return pool, pool.plan(candidate.request.workload, job, pool.free)
        return None

    def by_eviction(
        self, candidate: Candidate, victims_in: Callable[[ClusterPool], Sequence[str]]
    ) -> tuple[ClusterPool, Plan] | None:
        """Returns the pool and plan with the fewest victims; ties are broken by the order of pools."""
        found: tuple[ClusterPool, Plan] | None = None
        for pool in self.pools_for(candidate):
            victims = victims_in(pool)
            if victims and (found is None or len(victims) < len(found[1].victims)):
                free = pool.free + sum(pool.amounts(pool.ledger.held[victim]) for victim in victims)
                found = pool, pool.plan(candidate.request.workload, candidate.request.jobs[0], free, sorted(victims))
        return found

    def evictable(self, pool: ClusterPool, key: object, order: Callable[[str], Any]) -> tuple[list[str], Ints]:
        """Returns the workloads of a pool that may be evicted, and the sum of their holdings, shape (3, machines).

        `order` returns a workload's sort key, or None if it may not be evicted. The result is cached under `key`.
        """
        if (pool, key) not in self._evictable:
            found = []
            for name, where in self.placed.items():
                if where is pool and name in self.working and name not in self.leaving:
                    at = order(name)
                    if at is not None:
                        found.append((at, -self.placed_at_s[name], name))
            names, theirs = [name for *_, name in sorted(found)], np.zeros_like(pool.free)
            for name in names:
                theirs += pool.amounts(pool.ledger.held[name])
            self._evictable[pool, key] = names, theirs
        return self._evictable[pool, key]

    def victims(
        self,
        job: JobRequest,
        pool: ClusterPool,
        among: tuple[list[str], Ints],
        may_take: Callable[[Given, str], bool] = lambda given, victim: True,
        enough: Callable[[Given], bool] = lambda given: True,
    ) -> list[str]:
        """Returns victims with which a job fits; empty: all of `among`, the result of `evictable`, are not enough.

        Victims are taken in order, if `may_take` allows a victim after what the chosen ones give, until the job fits
        and `enough` holds. Victims that turn out to be unnecessary are kept running.
        """
        names, theirs = among
        if not names or not pool.fits(job, pool.free + theirs):
            return []
        free, chosen, given = pool.free.copy(), list[str](), Given()
        for victim in names:
            if may_take(given, victim):
                chosen.append(victim)
                given[self.workloads[victim].tenant] += self.gpus[victim]
                free += pool.amounts(pool.ledger.held[victim])
                if pool.fits(job, free) and enough(given):
                    break
        else:
            return []
        for victim in chosen[-2::-1]:
            tenant, gpus = self.workloads[victim].tenant, self.gpus[victim]
            less = free - pool.amounts(pool.ledger.held[victim])
            given[tenant] -= gpus
            if pool.fits(job, less) and enough(given):
                chosen.remove(victim)
                free = less
            else:
                given[tenant] += gpus
        return chosen

    def _place(self, candidate: Candidate) -> AuctionOutcome:
        self._counts.decisions += 1
        decided = self.decide(candidate)
        if decided is None:
            return AuctionOutcome(candidate.request.workload, None)
        pool, plan = decided
        pool.ledger.award(plan, candidate.request.jobs)
        pool.refresh(machine for machine, _ in plan.jobs[0].machines)
        self.leaving.update(plan.victims)
        for victim in plan.victims:
            self._uncount(victim)
        self._now_in(plan.workload, pool)
        return AuctionOutcome(plan.workload, Bid(plan.workload, plan.region, plan))

    def _now_in(self, workload: str, pool: ClusterPool) -> None:
        self._evictable.clear()
        self.placed[workload], self.placed_at_s[workload] = pool, self.now_s
        w = self.workloads[workload]
        if w.gpus and pool.gpu_type is not None:
            self._type_of[workload] = pool.gpu_type
            self.used[w.tenant][pool.gpu_type] += w.gpus
        self.came(workload)

    def _uncount(self, workload: str) -> None:
        """Subtracts the slots of a workload from the used ones, unless they were subtracted already."""
        self._evictable.clear()
        gpu_type, w = self._type_of.pop(workload, None), self.workloads[workload]
        if gpu_type is not None:
            self.used[w.tenant][gpu_type] -= w.gpus
