"""Judges waits by the objectives of their levels: each wait once, at its end or when its objective runs out.

Two waits are judged: until the award, and until the start of the tasks.
"""

from collections.abc import Callable
from math import inf

from domain.phases import QUEUED_PHASES
from domain.priority import OVER_QUOTA_RANK
from simulation.meter import Meter
from simulation.settings import SimulationSettings
from simulation.workload_columns import WorkloadColumns
from simulation.workload_state import WorkloadState


class Objectives:
    """Counts in the meter which waits of workloads are longer than the objectives of their levels."""

    def __init__(
        self,
        settings: SimulationSettings,
        columns: WorkloadColumns,
        meter: Meter,
        later: Callable[[float, str, WorkloadState], None],
    ) -> None:
        """`later` schedules a call of `run_out`: its event is `OBJECTIVE`."""
        self._settings, self._columns, self._meter, self._later = settings, columns, meter, later

    def remind(self, at_s: float, state: WorkloadState) -> None:
        """Schedules `run_out` for the waits that are not judged; call it after each change of `WorkloadState.turn`."""
        limit_s = self._limit_s(state)
        if state.phase in QUEUED_PHASES and limit_s < inf:
            self._later(max(at_s, state.objective_since_s + limit_s), "OBJECTIVE", state)
        if not state.start_judged and state.idle_since_s + limit_s < inf:
            self._later(max(at_s, state.idle_since_s + limit_s), "OBJECTIVE", state)

    def awarded(self, at_s: float, state: WorkloadState, rank: int) -> None:
        """Ends the wait until the award."""
        wait_s = at_s - state.objective_since_s
        self._judge(at_s, state, wait_s)
        self._meter.wait(at_s, "award", state.workload.level, rank >= OVER_QUOTA_RANK, wait_s)

    def started(self, at_s: float, state: WorkloadState) -> None:
        """Ends the wait until the start, unless the workload held its slots when the simulation began."""
        idle_s, over_quota = at_s - state.idle_since_s, bool(self._columns.rank[state.number] >= OVER_QUOTA_RANK)
        self._judge_start(at_s, state, idle_s, over_quota)
        if state.idle_since_s > -inf:
            self._meter.wait(at_s, "start", state.workload.level, over_quota, idle_s)

    def run_out(self, at_s: float, state: WorkloadState) -> None:
        """Judges a workload whose objective has run out while it is queued or has not started."""
        over_quota = bool(self._columns.rank[state.number] >= OVER_QUOTA_RANK)
        if state.phase in QUEUED_PHASES:
            over_quota = bool(self._columns.over_quota[state.number])
            if at_s >= state.objective_since_s + self._limit_s(state):
                self._judge(at_s, state, inf)
        if at_s >= state.idle_since_s + self._limit_s(state):
            self._judge_start(at_s, state, inf, over_quota)

    def _judge(self, at_s: float, state: WorkloadState, waited_s: float) -> None:
        if self._limit_s(state) < inf and not state.judged:
            state.judged = True
            over_quota = bool(self._columns.over_quota[state.number])
            self._meter.judge(at_s, "award", state.workload.level, over_quota, waited_s > self._limit_s(state))

    def _judge_start(self, at_s: float, state: WorkloadState, idle_s: float, over_quota: bool) -> None:
        if self._limit_s(state) < inf and not state.start_judged:
            state.start_judged = True
            self._meter.judge(at_s, "start", state.workload.level, over_quota, idle_s > self._limit_s(state))

    def _limit_s(self, state: WorkloadState) -> float:
        return self._settings.objective_s.get(state.workload.level, inf)
