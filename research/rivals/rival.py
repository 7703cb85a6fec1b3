"""The base class of the Slurm and Kueue models: ledgers, placed workloads, and one decision at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from domain.scheduling import Bid, JobRequest, MachineState, Plan, RunningWorkload
from gms.auction.candidate import AuctionOutcome, Candidate
from research.rivals.rooms import ClusterPool, pools_of
from simulation.engine import DecisionCounts, Ranks, ScanOrder
from simulation.errors import SimulationError
from simulation.ledger import Ledger
from simulation.run import Scenario, credit_weights
from simulation.supply import Machines
from simulation.workload_state import numbered


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
            raise SimulationError(f"workload {several}: has several jobs; slurm and kueue support only one job")
        self.ledgers = {region: Ledger(states) for region, states in sorted(machines.items())}
        self.pools = pools_of(self.ledgers)
        self.placed: dict[str, ClusterPool] = {}
        """Pool in which a workload holds slots, by workload id."""
        self.leaving: set[str] = set()
        """Victims that still hold their slots."""
        self.working: set[str] = set()
        """Workloads that hold all slots of their award."""
        self.now_s = 0.0
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
        self.working.add(workload.id)

    def leave(self, region: str, workload: str) -> None:
        """Releases all resources that a workload holds: its evictor gets what it is owed, and the rest becomes free."""
        ledger = self.ledgers[region]
        machines = list(ledger.held[workload])
        ledger.leave(workload)
        self.placed.pop(workload).refresh(machines)
        self.leaving.discard(workload)
        self.working.discard(workload)
        self.gone(workload)

    def join(self, region: str, machine: MachineState) -> None:
        """Not supported: the machines of these schedulers are fixed (`check_policy` rejects pools)."""
        raise SimulationError(f"{region}: machine {machine.id}: slurm and kueue do not support pools")

    def close(self, region: str, machine: str) -> None:
        """Not supported, as `join`."""
        raise SimulationError(f"{region}: machine {machine}: slurm and kueue do not support pools")

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
        """Hook that is called after a workload was placed."""

    def gone(self, workload: str) -> None:
        """Hook that is called after a workload released all its slots."""

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

    def _place(self, candidate: Candidate) -> AuctionOutcome:
        self._counts.decisions += 1
        decided = self.decide(candidate)
        if decided is None:
            return AuctionOutcome(candidate.request.workload, None)
        pool, plan = decided
        pool.ledger.award(plan, candidate.request.jobs)
        pool.refresh(machine for machine, _ in plan.jobs[0].machines)
        self.leaving.update(plan.victims)
        self._now_in(plan.workload, pool)
        return AuctionOutcome(plan.workload, Bid(plan.workload, plan.region, plan))

    def _now_in(self, workload: str, pool: ClusterPool) -> None:
        self.placed[workload] = pool
        self.came(workload)
