"""Applies `domain.lifecycle.endings` in a workload's workflow, and keeps the counts of failures in the workflow's
state.
"""

from dataclasses import replace

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.lifecycle.endings import (
        EndedAttempt,
        Ending,
        FailureCounts,
        count_loads,
        judge,
        unconfirmed,
        unless_cleared,
    )
    from domain.lifecycle.gangs import GangEnd, LaunchFailure
    from domain.lifecycle.suspicion import NONE, Suspicion, doubt
    from domain.protocol.workload_messages import WorkloadMessage
    from domain.protocol.workloads import LaunchPlan, WorkloadInput


class Verdicts:
    """Decides what happens after the end of each attempt of a workload: success, failure, or another attempt."""

    def __init__(self, state: WorkloadInput) -> None:
        self._state = state

    def judge(self, end: GangEnd, plan: LaunchPlan, told: WorkloadMessage | None, timed_out: bool = False) -> Ending:
        """Returns the decision after a gang's end. `told`: the message that stopped it, if any."""
        state = self._state
        case = EndedAttempt(
            end,
            plan,
            self._counts(),
            state.workload_id,
            state.attempt,
            state.ran_s,
            told,
            timed_out,
            not state.one_attempt,
        )
        ending, counts = judge(case)
        self._keep(counts)
        return ending

    def suspicion(self) -> Suspicion:
        """Returns the failures that no second machine has confirmed."""
        return Suspicion(tuple(self._state.suspects), self._state.unconfirmed)

    def count_late(self, end: GangEnd, plan: LaunchPlan, left: Suspicion) -> None:
        """Updates the counts after the end of an attempt that was released while its tasks saved.

        `left`: the unconfirmed failures at its release. A failure of a later attempt stays unconfirmed.
        """
        counts = count_loads(self._counts(), end, False)
        if counts.suspicion == left:
            counts = replace(counts, suspicion=unless_cleared(left, end, plan))
        self._keep(counts)

    def doubted(self, failed: LaunchFailure) -> LaunchFailure | None:
        """Returns a launch failure that blames nobody, because only one lent machine blames the workload.

        None: the failure is confirmed, so the workload is to blame. The machine may be honest, so the failure does not
        count towards its cordon. The workload avoids the machine in any case.
        """
        counts = self._counts()
        found = None
        if failed.lent is not None and not self._state.one_attempt:
            found = doubt(counts.suspicion, [failed.lent], failed.lent)
        self._keep(replace(counts, suspicion=NONE if found is None else found.after))
        return None if found is None else LaunchFailure(unconfirmed(failed.reason, found), None)

    def _counts(self) -> FailureCounts:
        state = self._state
        return FailureCounts(state.failures, state.hangs, state.unloadable, self.suspicion(), state.by_exit)

    def _keep(self, counts: FailureCounts) -> None:
        self._state.failures, self._state.hangs = counts.failures, counts.hangs
        self._state.unloadable, self._state.by_exit = counts.unloadable, dict(counts.by_exit)
        self._state.suspects, self._state.unconfirmed = list(counts.suspicion.machines), counts.suspicion.attempts
