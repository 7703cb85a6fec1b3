"""A simulated service under a trace of requests: its replicas, their queues, and the scalers that are compared.

The balancer sends each request to the ready replica with the fewest requests. A replica answers `slots` requests at a
time, each at its own fixed rate, and queues the others. A replica that drains gets no new requests, and ends when it is
idle. It is billed from its launch, with its cold start, to its end.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from domain.capacity import CapacityKind
from research.spot.requests import Requests
from services.controller import decide
from services.spot.autoscaler import LoadAutoscaler
from services.spot.policies import AllOnDemand
from services.values import (
    DrainReplica,
    EndReplica,
    LaunchReplica,
    ReplicaFacts,
    ServicePlan,
    ServiceState,
    SetReplicaBase,
    Stage,
)

SLOTS = 8
"""The requests that a replica answers at a time."""
EVERY_S = 5.0
"""The time between two decisions: `services.scaling_interval_s`."""
BOUND = 2.0
"""A request is late if it takes more than so many times the time that it takes alone."""


@dataclass
class ScaledReplica:
    """One replica and its requests."""

    number: int
    launched_s: float
    ready_s: float
    queue: deque[int] = field(default_factory=deque)
    """The requests that wait on the replica."""
    running: int = 0
    draining_s: float | None = None
    ended_s: float | None = None

    @property
    def load(self) -> int:
        """The number of its requests."""
        return self.running + len(self.queue)

    def takes(self, now_s: float) -> bool:
        """Returns whether it gets new requests."""
        return self.ready_s <= now_s and self.draining_s is None


@dataclass
class ScaledFleet:
    """The replicas at one time, and the requests that wait because none of them is ready."""

    cold_start_s: float
    now_s: float = 0.0
    replicas: dict[int, ScaledReplica] = field(default_factory=dict)
    ended: list[ScaledReplica] = field(default_factory=list)
    held: deque[int] = field(default_factory=deque)
    changes_s: list[float] = field(default_factory=list)
    """The times of launches and of drains."""

    def launch(self, ready_s: float | None = None) -> None:
        """Launches a replica. A plan that is known in advance gives the time at which it is ready."""
        number = len(self.replicas) + len(self.ended)
        at_s = self.now_s if ready_s is None else ready_s - self.cold_start_s
        self.replicas[number] = ScaledReplica(number, at_s, at_s + self.cold_start_s)
        self.changes_s.append(self.now_s)

    def drain(self, number: int) -> None:
        """Sends a replica no new requests."""
        self.replicas[number].draining_s = self.now_s
        self.changes_s.append(self.now_s)

    def end(self, number: int) -> None:
        """Ends a replica that is idle or still starting."""
        one = self.replicas.pop(number)
        assert not one.load, f"replica {number} ends with {one.load} requests"
        one.ended_s = self.now_s
        self.ended.append(one)

    def hours(self, from_s: float, to_s: float) -> float:
        """Returns the billed replica hours of a span of time."""
        both = [*self.replicas.values(), *self.ended]
        ends = ((one, to_s if one.ended_s is None else min(to_s, one.ended_s)) for one in both)
        return sum(max(0.0, end_s - max(from_s, one.launched_s)) for one, end_s in ends) / 3600


class FleetScaler(Protocol):
    """Changes the replicas of a fleet at each decision."""

    def decide(self, fleet: ScaledFleet, arrived: int) -> None:
        """Decides at `fleet.now_s`; `arrived` is the number of requests since the decision before."""
        ...


class LiveScaler:
    """The controller and the autoscaler of live services, with on-demand replicas."""

    def __init__(self, autoscaler: LoadAutoscaler, drain_s: float = 3600.0) -> None:
        self._plan = ServicePlan(AllOnDemand(), autoscaler, 1, min_replicas=autoscaler.most, drain_s=drain_s)
        self._state = ServiceState(self._plan.policy.start(), autoscaler.start())

    def decide(self, fleet: ScaledFleet, arrived: int) -> None:
        """See `FleetScaler.decide`."""
        facts = [_facts(one, fleet.now_s) for one in fleet.replicas.values()]
        ongoing = sum(one.load for one in fleet.replicas.values())
        decision = decide(self._plan, self._state, facts, (), arrived, fleet.now_s, len(fleet.held), ongoing)
        self._state = decision.state
        for action in decision.actions:
            if isinstance(action, LaunchReplica):
                fleet.launch()
            elif isinstance(action, DrainReplica):
                fleet.drain(action.number)
            elif isinstance(action, EndReplica):
                fleet.end(action.number)
            else:
                assert isinstance(action, SetReplicaBase)


def _facts(one: ScaledReplica, now_s: float) -> ReplicaFacts:
    base = ReplicaFacts(one.number, 1, CapacityKind.ON_DEMAND, None, Stage.STARTING, one.launched_s, ongoing=one.load)
    if one.draining_s is not None:
        return replace(base, stage=Stage.DRAINING, since_s=one.draining_s, was_ready=True)
    return replace(base, stage=Stage.READY, was_ready=True) if one.ready_s <= now_s else base


class PlannedScaler:
    """Follows a plan that is known in advance: the number of ready replicas in each slot of time."""

    def __init__(self, counts: Sequence[int], slot_s: float) -> None:
        self._counts, self._slot_s = counts, slot_s

    def decide(self, fleet: ScaledFleet, arrived: int) -> None:
        """See `FleetScaler.decide`."""
        wanted = self._counts[min(int(fleet.now_s / self._slot_s), len(self._counts) - 1)]
        serving = [one for one in fleet.replicas.values() if one.draining_s is None]
        for _ in range(wanted - len(serving)):
            fleet.launch(ready_s=fleet.now_s)
        for one in sorted(serving, key=lambda one: (one.load, -one.number))[: max(0, len(serving) - wanted)]:
            fleet.drain(one.number)
        for one in [one for one in fleet.replicas.values() if one.draining_s is not None and not one.load]:
            fleet.end(one.number)


@dataclass(frozen=True)
class FleetRun:
    """The run of a scaler on a trace."""

    late: tuple[bool, ...]
    """For each request, whether it took more than the bound."""
    fleet: ScaledFleet

    def share(self, from_index: int = 0) -> float:
        """Returns the share of the requests from an index on that were not late."""
        kept = self.late[from_index:]
        return 1 - sum(kept) / len(kept)

    def changes_per_h(self, from_s: float, to_s: float) -> float:
        """Returns the launches and drains in each hour of a span of time."""
        return 3600 * sum(from_s <= at_s < to_s for at_s in self.fleet.changes_s) / (to_s - from_s)


def run_fleet(requests: Requests, scaler: FleetScaler, cold_start_s: float, length_s: float) -> FleetRun:
    """Serves the requests of `length_s` seconds with the replicas of a scaler, which decides each `EVERY_S` seconds."""
    return _Run(requests, scaler, ScaledFleet(cold_start_s)).run(length_s)


class _Run:
    def __init__(self, requests: Requests, scaler: FleetScaler, fleet: ScaledFleet) -> None:
        self._arrival_s: list[float] = requests.arrival_s.tolist()
        self._service_s: list[float] = requests.service_s.tolist()
        self._scaler, self._fleet = scaler, fleet
        self._late = [True] * len(self._arrival_s)
        self._ends: list[tuple[float, int, ScaledReplica]] = []
        """When each running request ends, and where."""

    def run(self, length_s: float) -> FleetRun:
        fleet, at, decided = self._fleet, 0, 0
        for step in range(int(length_s / EVERY_S) + 1):
            fleet.now_s = step * EVERY_S
            self._finish(fleet.now_s)
            self._admit_held()
            self._scaler.decide(fleet, at - decided)
            decided = at
            self._admit_held()
            until_s = fleet.now_s + EVERY_S
            while at < len(self._arrival_s) and self._arrival_s[at] < until_s:
                self._finish(self._arrival_s[at])
                fleet.now_s = self._arrival_s[at]
                self._admit_held()
                self._admit(at)
                at += 1
        self._finish(float("inf"))
        return FleetRun(tuple(self._late), fleet)

    def _admit(self, request: int) -> None:
        here = [one for one in self._fleet.replicas.values() if one.takes(self._fleet.now_s)]
        if not here:
            self._fleet.held.append(request)
            return
        one = min(here, key=lambda one: one.load)
        if one.running < SLOTS:
            self._start(one, request, self._fleet.now_s)
        else:
            one.queue.append(request)

    def _admit_held(self) -> None:
        if self._fleet.held and any(one.takes(self._fleet.now_s) for one in self._fleet.replicas.values()):
            waiting, self._fleet.held = self._fleet.held, deque()
            for request in waiting:
                self._admit(request)

    def _start(self, one: ScaledReplica, request: int, now_s: float) -> None:
        one.running += 1
        service_s = self._service_s[request]
        end_s = now_s + service_s
        self._late[request] = end_s - self._arrival_s[request] > BOUND * service_s
        heapq.heappush(self._ends, (end_s, request, one))

    def _finish(self, until_s: float) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            end_s, _, one = heapq.heappop(self._ends)
            one.running -= 1
            if one.queue:
                self._start(one, one.queue.popleft(), end_s)
