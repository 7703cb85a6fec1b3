"""An engine on the reference implementations of scan and bid, for tests and benchmarks: slow, but simple."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

import gms.contested_use
import reference.bids
import reference.queue_scan
from domain.scheduling import (
    CreditWeights,
    MachineState,
    PlacedWorkload,
    Plan,
    QueuedWorkload,
    QueueSnapshot,
    RegionSnapshot,
    RunningWorkload,
    TenantState,
)
from gms.auction.candidate import AuctionOutcome, Candidate
from gms.columns import QueueChange, W
from simulation.engine import DecisionCounts, Engine, ScanOrder
from simulation.errors import SimulationError
from simulation.ledger import Ledger
from simulation.policies import SchedulingPolicy
from simulation.run import Scenario, credit_weights
from simulation.supply import Machines


class ReferenceEngine:
    """An engine that scans snapshots of the queue, and places one workload at a time on snapshots of the regions."""

    def __init__(
        self, machines: Mapping[str, tuple[MachineState, ...]], weights: CreditWeights, may_evict: bool = True
    ) -> None:
        self._weights, self._may_evict = weights, may_evict
        self._tenants: tuple[TenantState, ...] = ()
        self._pending: dict[str, QueuedWorkload] = {}
        self._placed: dict[str, PlacedWorkload] = {}
        self._ledgers = {region: Ledger(states) for region, states in sorted(machines.items())}
        self._running: dict[str, dict[str, RunningWorkload]] = {region: {} for region in self._ledgers}
        self._gangs: dict[object, int] = {}
        self._now_s = 0.0
        self._counts = DecisionCounts()

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Replaces the tenants and their shares."""
        self._tenants = tuple(tenants)

    def change(
        self, pending: Sequence[QueueChange[QueuedWorkload]], placed: Sequence[QueueChange[PlacedWorkload]]
    ) -> None:
        """Applies changes of the pending and the placed workloads."""
        for change in pending:
            _put(self._pending, change)
        for news in placed:
            _put(self._placed, news)

    def scan(self, now_s: float) -> ScanOrder:
        """Ranks all pending and placed workloads."""
        pending, placed = tuple(self._pending.values()), tuple(self._placed.values())
        result = reference.queue_scan.scan(QueueSnapshot(now_s, self._tenants, pending, placed, self._weights))
        gangs = [self._gangs.setdefault(self._pending[r.id].jobs, len(self._gangs)) for r in result.queue]
        ranks = result.placed_ranks
        return ScanOrder(
            np.array([int(r.id) for r in result.queue], np.int64),
            np.array([r.rank for r in result.queue], np.int64),
            np.array(gangs, np.int64),
            np.array([int(id_) for id_ in ranks], np.int64),
            np.array(list(ranks.values()), np.int64),
            lambda place: result.queue[place],
            frozenset(
                w.tenant for w in pending if not w.held and w.submitted_at_s <= now_s - gms.contested_use.WAITS_AFTER_S
            ),
        )

    def open(self, now_s: float) -> None:
        """Begins a pass over the queue."""
        self._now_s = now_s

    def place(self, candidates: Sequence[Candidate]) -> Sequence[AuctionOutcome]:
        """Places the candidates one after another: collects bids, and awards the best."""
        return [self._place(candidate) for candidate in candidates]

    def _place(self, candidate: Candidate) -> AuctionOutcome:
        self._counts.decisions += 1
        bids = []
        for region in self._ledgers:
            if candidate.regions is None or region in candidate.regions:
                bids.append(reference.bids.bid(self._snapshot(region), candidate.request))
                self._counts.negative_misses += 1
        plan = reference.bids.best(bid.plan for bid in bids if bid.plan is not None)
        if plan is None:
            return AuctionOutcome(candidate.request.workload, None, {bid.region: bid for bid in bids})
        self._award(plan, candidate)
        won = next(bid for bid in bids if bid.plan is plan)
        return AuctionOutcome(candidate.request.workload, won, {bid.region: bid for bid in bids})

    def _snapshot(self, region: str) -> RegionSnapshot:
        ledger = self._ledgers[region]
        running = [
            replace(w, holdings=ledger.holdings(id_), evictable=w.evictable and self._may_evict)
            for id_, w in self._running[region].items()
        ]
        machines = tuple(map(ledger.state, filter(ledger.is_open, ledger.machines)))
        return RegionSnapshot(region, self._now_s, machines, tuple(running))

    def _award(self, plan: Plan, candidate: Candidate) -> None:
        self._ledgers[plan.region].award(plan, candidate.request.jobs)
        running = self._running[plan.region]
        for victim in plan.victims:
            running[victim] = replace(running[victim], evictable=False)
        running[plan.workload] = RunningWorkload(
            plan.workload,
            candidate.request.rank,
            self._now_s,
            (),
            None,
            evictable=False,
            tenant=candidate.request.tenant,
        )

    def running(self, region: str, workload: RunningWorkload) -> None:
        """Adds or updates a workload that holds slots."""
        if workload.id not in self._ledgers[region].held:
            self._ledgers[region].hold(workload.id, workload.holdings, taken=True)
        self._running[region][workload.id] = workload

    def leave(self, region: str, workload: str) -> None:
        """Releases all resources that a workload holds."""
        self._ledgers[region].leave(workload)
        del self._running[region][workload]

    def join(self, region: str, machine: MachineState) -> None:
        """Adds a machine, all of it free."""
        self._ledgers[region].join(machine)

    def close(self, region: str, machine: str) -> None:
        """Closes a machine to new workloads."""
        self._ledgers[region].close(machine)

    def counts(self) -> DecisionCounts:
        """Returns the counts of decisions so far."""
        return self._counts


def on_reference(policy: SchedulingPolicy) -> SchedulingPolicy:
    """Returns the policy on the reference implementations."""
    return replace(policy, engine=partial(_engine, may_evict=policy.may_evict))


def _engine(scenario: Scenario, machines: Machines, *, may_evict: bool) -> Engine:
    settings = scenario.settings
    if settings.reserve_after_s < inf:
        raise SimulationError(f"reserve_after_s: {settings.reserve_after_s:g}: must be inf for the reference engine")
    return ReferenceEngine(machines, credit_weights(settings), may_evict)


def _put(into: dict[str, W], change: QueueChange[W]) -> None:
    if change.now is None:
        into.pop(change.id, None)
    else:
        into[change.id] = change.now
