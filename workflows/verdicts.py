"""What follows from how an attempt ended, or from what it was told before it began."""

from dataclasses import dataclass
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.ids import task_log
    from domain.phases import Phase
    from domain.protocol import LaunchPlan, Mail, MailKind, WorkloadInput
    from domain.reasons import Reason, ReasonCode
    from domain.reported import TaskProgress
    from workflows.gang import GangEnd
    from workflows.loading import failed_load, loaded

HANGS_IN_A_ROW = 3
"""A gang that hung this often in a row, without a step in between, has failed."""
UNLOADABLE_IN_A_ROW = 2
"""A workload whose checkpoints cannot be loaded so often in a row has failed: each restart would find the same."""
MINDS_REPORTS = "minds-notices-and-loads"
"""Patch: how an attempt ended is also judged by what its tasks report of notices and of loading."""
STOP_REASONS = {
    MailKind.EVICT: ReasonCode.EVICTED,
    MailKind.PREEMPT: ReasonCode.PREEMPTED_BY_OPERATOR,
    MailKind.MACHINE_LOST: ReasonCode.MACHINE_LOST,
    MailKind.HUNG: ReasonCode.NO_PROGRESS,
    MailKind.CANCEL: ReasonCode.CANCELLED_BY_USER,
}
STOPS = frozenset(STOP_REASONS)
"""Mail that asks an attempt to stop."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: the phase that follows, why, and what the tasks last reported."""

    phase: Phase
    reason: Reason
    progress: tuple[TaskProgress, ...] = ()
    blames_machine: str | None = None
    flushing_s: float | None = None
    """Its tasks still run, and may go on for so long to save; None: nothing runs any more."""


def code_of(mail: Mail) -> ReasonCode:
    """A mail may say more exactly why it asks to stop, by a `code` in its detail."""
    code = mail.detail.get("code")
    return ReasonCode(code) if code is not None else STOP_REASONS[MailKind(mail.kind)]


def lost_machine(mail: Mail | None) -> str | None:
    """The machine whose loss is told, if it is."""
    lost = mail is not None and mail.kind == MailKind.MACHINE_LOST
    return str(mail.detail["machine"]) if mail is not None and lost else None


def stopped_early(mail: Mail) -> Ending:
    """Told to stop before any task was started."""
    reason = Reason(code_of(mail), mail.detail)
    if mail.kind == MailKind.CANCEL:
        return Ending(Phase.CANCELLED, reason)
    phase = Phase.PENDING if mail.kind == MailKind.MACHINE_LOST else Phase.PREEMPTED
    blamed = str(mail.detail["machine"]) if mail.kind == MailKind.MACHINE_LOST else None
    return Ending(phase, reason, (), blamed)


class Verdicts:
    """Judges a workload's attempts; what happens in a row is counted in its workflow's `state`."""

    def __init__(self, state: WorkloadInput) -> None:
        self._state = state

    def judge(self, end: GangEnd, plan: LaunchPlan, mail: Mail | None, timed_out: bool, started: float) -> Ending:
        """What follows from how the gang ended and from what it was told."""
        if any(p.step is not None and p.step > (p.resumed_step or 0) for p in end.progress):
            self._state.hangs = 0
        if end.all_succeeded:
            return Ending(Phase.SUCCEEDED, Reason(ReasonCode.COMPLETED, {"tasks": plan.tasks}), end.progress)
        if mail is not None and mail.kind == MailKind.CANCEL:
            return Ending(Phase.CANCELLED, Reason(ReasonCode.CANCELLED_BY_USER, mail.detail), end.progress)
        if timed_out:
            return Ending(Phase.FAILED, self.why_stopped(None, plan, started), end.progress)
        noticed = end.noticed if mail is None and end.noticed is not None and workflow.patched(MINDS_REPORTS) else None
        own = mail is None and noticed is None and end.lost_machine is None and end.refused is None
        unloadable = self.mind_loads(end, own)
        if unloadable is not None and (own or self._state.unloadable >= UNLOADABLE_IN_A_ROW):
            phase = Phase.FAILED if self._state.unloadable >= UNLOADABLE_IN_A_ROW else Phase.PENDING
            return Ending(phase, unloadable, end.progress)
        if noticed is not None:
            self._state.hangs = 0
            return Ending(Phase.PREEMPTED, noticed, end.progress)
        if end.lost_machine is not None:
            reason = Reason(ReasonCode.MACHINE_LOST, {"machine": end.lost_machine})
            return Ending(Phase.PENDING, reason, end.progress, end.lost_machine)
        if mail is None and end.refused is not None:
            return Ending(Phase.PENDING, end.refused.reason, end.progress, end.refused.blames_machine)
        if mail is None and end.stopped_before:
            return Ending(Phase.PREEMPTED, Reason(ReasonCode.STACK_STOPPED), end.progress)
        if mail is None:
            return self._failed(end, plan)
        why = self.why_stopped(mail, plan, started)
        if mail.kind == MailKind.HUNG:
            return self._hung(end, why)
        self._state.hangs = 0
        if mail.kind == MailKind.MACHINE_LOST:
            return Ending(Phase.PENDING, why, end.progress, str(mail.detail.get("machine")))
        return Ending(Phase.PREEMPTED, why, end.progress)

    def mind_loads(self, end: GangEnd, own: bool) -> Reason | None:
        """Counts attempts in a row whose checkpoint could not be loaded; why, where this is one.

        `own`: it ended by a failure of its own. The first such failure is no failure of the user's: a store that did
        not answer may answer next time. A load that succeeds ends the row.
        """
        failed = failed_load(end.progress, end.first_failure.name if own else None, end.first_failure.status)
        if failed is None:
            if loaded(end.progress):
                self._state.unloadable = 0
            return None
        if not workflow.patched(MINDS_REPORTS):
            return None
        self._state.unloadable += 1
        detail = {"task": failed.task, "error": failed.error, "skipped": failed.skipped}
        detail |= {"failures": self._state.unloadable, "limit": UNLOADABLE_IN_A_ROW}
        return Reason(ReasonCode.CHECKPOINT_UNLOADABLE, detail)

    def _failed(self, end: GangEnd, plan: LaunchPlan) -> Ending:
        failed = end.first_failure
        detail: dict[str, Any] = {"task": failed.name, "status": failed.status, "retries": plan.retries}
        final, again = ReasonCode.RETRIES_EXHAUSTED, ReasonCode.TASK_FAILED
        if "/" in failed.name:
            detail["log"] = task_log(self._state.workload_id, self._state.attempt, failed.name)
        if failed.memory is not None:
            detail |= failed.memory
            final = again = ReasonCode.OUT_OF_MEMORY
        self._state.failures += 1
        if self._state.failures > plan.retries:
            return Ending(Phase.FAILED, Reason(final, detail), end.progress)
        detail["failures"] = self._state.failures
        return Ending(Phase.PENDING, Reason(again, detail), end.progress)

    def _hung(self, end: GangEnd, why: Reason) -> Ending:
        self._state.hangs += 1
        phase = Phase.FAILED if self._state.hangs >= HANGS_IN_A_ROW else Phase.PENDING
        return Ending(phase, why, end.progress)

    def why_stopped(self, mail: Mail | None, plan: LaunchPlan, started: float) -> Reason:
        """By what was told, else since the runtime is used up; `started` is when the gang began (workflow time)."""
        if mail is not None:
            return Reason(code_of(mail), mail.detail)
        ran_s = round(self._state.ran_s + workflow.time() - started, 3)
        return Reason(ReasonCode.MAX_RUNTIME, {"ran_s": ran_s, "limit_s": plan.max_runtime_s})
