"""How a workload's workflow asks `lifecycle.endings`, and keeps what happened in a row in its state."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol import LaunchPlan, Mail, WorkloadInput
    from lifecycle.endings import Case, Counts, Ending, count_loads, judge
    from lifecycle.gangs import GangEnd

MINDS_REPORTS = "minds-notices-and-loads"
"""Patch: how an attempt ended is also judged by what its tasks report of notices and of loading."""


def minds_reports() -> bool:
    """Whether this workflow does; asked only where it matters, for a patch leaves a mark in the history."""
    return workflow.patched(MINDS_REPORTS)


class Verdicts:
    """Judges a workload's attempts."""

    def __init__(self, state: WorkloadInput) -> None:
        self._state = state

    def judge(self, end: GangEnd, plan: LaunchPlan, told: Mail | None, timed_out: bool = False) -> Ending:
        """What follows from how the gang ended and from what it was told. `state.ran_s` has its time already."""
        state = self._state
        case = Case(
            end, plan, self._counts(), state.workload_id, state.attempt, state.ran_s, told, timed_out, minds_reports
        )
        ending, counts = judge(case)
        self._keep(counts)
        return ending

    def count_loads(self, end: GangEnd) -> None:
        """An attempt that was given up while its tasks saved has ended."""
        self._keep(count_loads(self._counts(), end, False, minds_reports))

    def _counts(self) -> Counts:
        return Counts(self._state.failures, self._state.hangs, self._state.unloadable)

    def _keep(self, counts: Counts) -> None:
        self._state.failures, self._state.hangs = counts.failures, counts.hangs
        self._state.unloadable = counts.unloadable
