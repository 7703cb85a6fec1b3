"""The event loop on the virtual clock: runs each event in time order, and a pass over the queue after changes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush
from math import inf

from simulation.engine import Engine, ScanOrder
from simulation.meter import Meter
from simulation.passes import Passes
from simulation.policies import SchedulingPolicy
from simulation.scenario import Scenario
from simulation.transitions import Happened, Transitions
from simulation.workload_state import WorkloadState


class EventKind(IntEnum):
    """The kinds of events, in the order of events at the same time; a pass over the queue runs before `OBJECTIVE`."""

    FINISH = 0
    LEAVE = 1
    START = 2
    CANCEL = 3
    SUBMIT = 4
    OBJECTIVE = 5


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run."""

    now_s: float
    workloads: int
    arrived: int
    finished: int
    queued: int
    events: int
    done: float
    """From 0 to 1: the share of workloads that finished, or of the time until `until_s`, whichever is larger."""


class Simulator:
    """One run of a policy on a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        policy: SchedulingPolicy,
        engine: Engine,
        meter: Meter,
        follow: Callable[[Happened], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self._heap: list[tuple[float, int, int, int]] = []
        self.transitions = Transitions(scenario, policy, engine, meter, self._later, follow)
        self._passes = Passes(self.transitions)
        self.keeper = scenario.sources.keeper(self.transitions, meter, self._passes.shortages, scenario.seed)
        states = self.transitions.states
        self._arrivals = sorted(
            (s for s in states if s.workload.id not in scenario.holding and s.workload.arrives_s < inf),
            key=lambda state: (state.workload.arrives_s, state.number),
        )
        self._state_of = {state.workload.id: state for state in states}
        self._arrived = 0
        self.now_s = 0.0
        self.events = 0
        for state in states:
            held = scenario.holding.get(state.workload.id)
            if held is not None:
                self.transitions.begin_holding(state, held)

    def _later(self, at_s: float, kind: str, state: WorkloadState) -> None:
        # The turn identifies the attempt (or wait) of the event: if another has begun, the event is stale.
        heappush(self._heap, (at_s, EventKind[kind], state.number, state.turn))

    def submit(self, at_s: float, workload: str) -> None:
        """Submits a workload that has not been submitted (`arrives_s` is infinite) or was cancelled, at `at_s`.

        This method and the next two are for observers of the run, which act for persons.
        """
        self._later(at_s, "SUBMIT", self._state_of[workload])

    def cancel(self, at_s: float, workload: str) -> None:
        """Cancels a workload at `at_s` if it waits until then. If it holds slots already, it ends once it has started.

        A workload that gets its slots after this call and before `at_s` is not cancelled.
        """
        self._later(at_s, "CANCEL", self._state_of[workload])

    def prolong(self, at_s: float, workload: str, more_s: float) -> None:
        """Makes a workload that starts at `at_s` hold its slots for `more_s` longer than its work takes."""
        state = self._state_of[workload]
        state.workload = replace(state.workload, duration_s=state.workload.duration_s + more_s)
        state.turn += 1
        self._later(at_s + state.remaining_s(), "FINISH", state)

    @property
    def standing(self) -> ScanOrder | None:
        """The queue as the last pass ranked it, with workloads that it has awarded; None before the first pass."""
        return self._passes.standing

    @property
    def progress(self) -> RunProgress:
        """The progress of the run."""
        transitions = self.transitions
        arrived = self._arrived + len(self.scenario.holding)
        done = max(transitions.finished / max(1, len(transitions.states)), self.now_s / self.scenario.until_s)
        workloads, queued = len(transitions.states), len(transitions.queue)
        return RunProgress(self.now_s, workloads, arrived, transitions.finished, queued, self.events, done)

    def run(self, stop: Callable[[RunProgress], bool] | None = None, every: int = 256) -> bool:
        """Runs until no events are left, or until `until_s`. `stop` is called once every `every` events.

        At the end, queued workloads whose objective has run out have been judged; the others have not.

        Returns:
            Whether the run came to its end; False if `stop` interrupted it.
        """
        next_stop = 0
        while True:
            if stop is not None and self.events >= next_stop:
                if stop(self.progress):
                    self.transitions.meter.advance(self.now_s)
                    return False
                next_stop = self.events + every
            at_s = self._next_s()
            if at_s > self.scenario.until_s or at_s == inf:
                if self.scenario.until_s != inf:
                    self.now_s = self.scenario.until_s
                self.transitions.meter.advance(self.now_s)
                return True
            self.now_s = at_s
            self.transitions.meter.advance(at_s)
            self._happen(at_s, before=EventKind.OBJECTIVE)
            self._arrive(at_s)
            if self.keeper.due_s <= at_s:
                self._passes.news |= self.keeper.happen(at_s)
                self.events += 1
            if self._passes.due_s() <= at_s:
                if self._passes.news:
                    self.keeper.changed(at_s)
                self._passes.go(at_s)
                self.events += 1
            self._happen(at_s, before=None)

    def _next_s(self) -> float:
        while self._heap and self.transitions.states[self._heap[0][2]].turn != self._heap[0][3]:
            heappop(self._heap)
        at_s = self._heap[0][0] if self._heap else inf
        if self._arrived < len(self._arrivals):
            at_s = min(at_s, self._arrivals[self._arrived].workload.arrives_s)
        at_s = min(at_s, self.keeper.due_s)
        # Without further events, a pass has the result of the pass before, unless time alone changes it.
        if at_s == inf and not self._passes.news and self._passes.retry_at_s == inf:
            return inf
        return min(at_s, max(self._passes.due_s(), self.now_s))

    def _happen(self, at_s: float, before: EventKind | None) -> None:
        while self._heap and self._heap[0][0] <= at_s and (before is None or self._heap[0][1] < before):
            _, kind, number, turn = heappop(self._heap)
            state = self.transitions.states[number]
            if state.turn != turn:
                continue
            self.events += 1
            if kind == EventKind.FINISH:
                self.transitions.finish(at_s, state)
            elif kind == EventKind.LEAVE:
                self.transitions.leave(at_s, state)
            elif kind == EventKind.START:
                self.transitions.start(at_s, state)
            elif kind == EventKind.CANCEL:
                self.transitions.cancel(at_s, state)
            elif kind == EventKind.SUBMIT:
                self.transitions.submit(at_s, state)
            else:
                self.transitions.objectives.run_out(at_s, state)
            if kind not in (EventKind.START, EventKind.OBJECTIVE):
                self._passes.news = True
                self.keeper.hope(at_s)

    def _arrive(self, at_s: float) -> None:
        while self._arrived < len(self._arrivals):
            state = self._arrivals[self._arrived]
            if state.workload.arrives_s > at_s:
                return
            self._arrived += 1
            self.events += 1
            self.transitions.arrive(at_s, state)
            self.keeper.hope(at_s)
            self._passes.news = True
