"""What follows from how an attempt ended: one table, of which the first row that applies decides."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from domain.ids import task_log
from domain.phases import Phase
from domain.protocol import LaunchPlan, Mail, MailKind
from domain.reasons import Reason, ReasonCode
from domain.reported import TaskProgress
from lifecycle.gangs import GangEnd
from lifecycle.loading import FailedLoad, failed_load, loaded

HANGS_IN_A_ROW = 3
"""A gang that hung this often in a row, without a step in between, has failed."""
UNLOADABLE_IN_A_ROW = 2
"""A workload whose checkpoints cannot be loaded so often in a row has failed: each restart would find the same."""
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
class Counts:
    """What happened in a row so far, over the attempts of a workload."""

    failures: int = 0
    """Failures of the user's own, in all."""
    hangs: int = 0
    """Attempts in a row that hung."""
    unloadable: int = 0
    """Attempts in a row whose checkpoint could not be loaded; attempts that ended before they loaded do not count."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: the phase that follows, why, and what the tasks last reported."""

    phase: Phase
    reason: Reason
    progress: tuple[TaskProgress, ...] = ()
    blames_machine: str | None = None
    flushing_s: float | None = None
    """Its tasks still run, and may go on for so long to save; None: nothing runs any more."""


@dataclass(frozen=True)
class Case:
    """All that an ending is judged by."""

    end: GangEnd
    plan: LaunchPlan
    counts: Counts
    """Before this ending."""
    workload_id: str
    attempt: int
    ran_s: float
    """Seconds of running, all attempts together."""
    told: Mail | None = None
    """The mail that asked it to stop."""
    timed_out: bool = False
    """Its maximum runtime is used up."""
    minds_reports: Callable[[], bool] = lambda: True
    """Whether what tasks report of notices and loads counts: workflows of before it did ask a patch, each when it
    matters first."""

    @cached_property
    def noticed(self) -> Reason | None:
        """The platform's word that it takes a machine, where nothing else asked the gang to stop."""
        return self.end.noticed if self.told is None and self.end.noticed is not None and self.minds_reports() else None

    @cached_property
    def own(self) -> bool:
        """Whether it ended by itself."""
        end = self.end
        return self.told is None and self.noticed is None and end.lost_machine is None and end.refused is None

    @cached_property
    def failed_load(self) -> FailedLoad | None:
        """The task that could not load its checkpoint, if one could not."""
        return _failed_load(self.end, self.own)

    @cached_property
    def counts_after(self) -> Counts:
        """The counts with what the tasks report taken into account, which does not depend on the row."""
        counts = self.counts
        if any(p.step is not None and p.step > (p.resumed_step or 0) for p in self.end.progress):
            counts = replace(counts, hangs=0)
        if self.end.all_succeeded or self.is_told(MailKind.CANCEL) or self.timed_out:
            return counts
        return count_loads(counts, self.end, self.own, self.minds_reports)

    def is_told(self, kind: MailKind) -> bool:
        """Whether it was told to stop by mail of a kind."""
        return self.told is not None and self.told.kind == kind

    @cached_property
    def is_unloadable(self) -> bool:
        """Whether its checkpoint could not be loaded, and that is why it ended, or it has happened too often."""
        if self.failed_load is None or not self.minds_reports():
            return False
        return self.own or self.counts_after.unloadable >= UNLOADABLE_IN_A_ROW


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    applies: Callable[[Case], bool]
    phase: Phase
    reason: Callable[[Case], Reason]
    counts: Callable[[Counts], Counts] = lambda counts: counts
    blames: Callable[[Case], str | None] = lambda case: None


def _failed_load(end: GangEnd, own: bool) -> FailedLoad | None:
    return failed_load(end.progress, end.first_failure.name if own else None, end.first_failure.status)


def count_loads(counts: Counts, end: GangEnd, own: bool, minds_reports: Callable[[], bool]) -> Counts:
    """The counts after an attempt, as far as loading is concerned; `own`: it ended by a failure of its own.

    The first load that fails is no failure of the user's: a store that did not answer may answer next time. A load that
    succeeds ends the row.
    """
    if _failed_load(end, own) is not None:
        return replace(counts, unloadable=counts.unloadable + 1) if minds_reports() else counts
    return replace(counts, unloadable=0) if loaded(end.progress) else counts


def code_of(mail: Mail) -> ReasonCode:
    """A mail may say more exactly why it asks to stop, by a `code` in its detail."""
    code = mail.detail.get("code")
    return ReasonCode(code) if code is not None else STOP_REASONS[MailKind(mail.kind)]


def lost_machine(mail: Mail | None) -> str | None:
    """The machine that the mail reports as lost; None: the mail is about something else."""
    return str(mail.detail["machine"]) if mail is not None and mail.kind == MailKind.MACHINE_LOST else None


def completed(plan: LaunchPlan) -> Reason:
    """Why a gang all of whose tasks succeeded has ended."""
    return Reason(ReasonCode.COMPLETED, {"tasks": plan.tasks})


def why_stopped(told: Mail | None, plan: LaunchPlan, ran_s: float) -> Reason:
    """By what was told, else because the runtime is used up."""
    if told is not None:
        return Reason(code_of(told), told.detail)
    return Reason(ReasonCode.MAX_RUNTIME, {"ran_s": round(ran_s, 3), "limit_s": plan.max_runtime_s})


def _completed(case: Case) -> Reason:
    return completed(case.plan)


def _cancelled(case: Case) -> Reason:
    assert case.told is not None
    return Reason(ReasonCode.CANCELLED_BY_USER, case.told.detail)


def _as_told(case: Case) -> Reason:
    return why_stopped(case.told, case.plan, case.ran_s)


def _unloadable(case: Case) -> Reason:
    failed = case.failed_load
    assert failed is not None
    detail: dict[str, Any] = {"task": failed.task, "error": failed.error, "skipped": failed.skipped}
    detail |= {"failures": case.counts_after.unloadable, "limit": UNLOADABLE_IN_A_ROW}
    return Reason(ReasonCode.CHECKPOINT_UNLOADABLE, detail)


def _noticed(case: Case) -> Reason:
    assert case.noticed is not None
    return case.noticed


def _lost(case: Case) -> Reason:
    return Reason(ReasonCode.MACHINE_LOST, {"machine": case.end.lost_machine})


def _refused(case: Case) -> Reason:
    assert case.end.refused is not None
    return case.end.refused.reason


def _failed(case: Case) -> Reason:
    failed = case.end.first_failure
    detail: dict[str, Any] = {"task": failed.name, "status": failed.status, "retries": case.plan.retries}
    final = case.counts.failures >= case.plan.retries
    code = ReasonCode.RETRIES_EXHAUSTED if final else ReasonCode.TASK_FAILED
    if "/" in failed.name:
        detail["log"] = task_log(case.workload_id, case.attempt, failed.name)
    if failed.memory is not None:
        detail |= failed.memory
        code = ReasonCode.OUT_OF_MEMORY
    if not final:
        detail["failures"] = case.counts.failures + 1
    return Reason(code, detail)


def _one_failure_more(counts: Counts) -> Counts:
    return replace(counts, failures=counts.failures + 1)


def _one_hang_more(counts: Counts) -> Counts:
    return replace(counts, hangs=counts.hangs + 1)


def _no_hang(counts: Counts) -> Counts:
    return replace(counts, hangs=0)


ENDINGS = (
    Row("all tasks succeeded", lambda case: case.end.all_succeeded, Phase.SUCCEEDED, _completed),
    Row("cancelled", lambda case: case.is_told(MailKind.CANCEL), Phase.CANCELLED, _cancelled),
    Row("maximum runtime used up", lambda case: case.timed_out, Phase.FAILED, _as_told),
    Row(
        "checkpoint unloadable again",
        lambda case: case.is_unloadable and case.counts_after.unloadable >= UNLOADABLE_IN_A_ROW,
        Phase.FAILED,
        _unloadable,
    ),
    Row("checkpoint unloadable", lambda case: case.is_unloadable, Phase.PENDING, _unloadable),
    Row("platform takes a machine", lambda case: case.noticed is not None, Phase.PREEMPTED, _noticed, _no_hang),
    Row(
        "machine found lost",
        lambda case: case.end.lost_machine is not None,
        Phase.PENDING,
        _lost,
        blames=lambda case: case.end.lost_machine,
    ),
    Row(
        "launch refused",
        lambda case: case.told is None and case.end.refused is not None,
        Phase.PENDING,
        _refused,
        blames=lambda case: case.end.refused.blames_machine if case.end.refused is not None else None,
    ),
    Row(
        "stopped by an earlier workflow",
        lambda case: case.told is None and case.end.stopped_before,
        Phase.PREEMPTED,
        lambda case: Reason(ReasonCode.STACK_STOPPED),
    ),
    Row(
        "task failed, no retry left",
        lambda case: case.told is None and case.counts.failures >= case.plan.retries,
        Phase.FAILED,
        _failed,
        _one_failure_more,
    ),
    Row("task failed", lambda case: case.told is None, Phase.PENDING, _failed, _one_failure_more),
    Row(
        "hung again",
        lambda case: case.is_told(MailKind.HUNG) and case.counts_after.hangs + 1 >= HANGS_IN_A_ROW,
        Phase.FAILED,
        _as_told,
        _one_hang_more,
    ),
    Row("hung", lambda case: case.is_told(MailKind.HUNG), Phase.PENDING, _as_told, _one_hang_more),
    Row(
        "told of a lost machine",
        lambda case: case.is_told(MailKind.MACHINE_LOST),
        Phase.PENDING,
        _as_told,
        _no_hang,
        blames=lambda case: lost_machine(case.told),
    ),
    Row("told to leave", lambda case: True, Phase.PREEMPTED, _as_told, _no_hang),
)
"""In order. What a task's failure is due to is looked for before it counts as the user's."""


def judge(case: Case) -> tuple[Ending, Counts]:
    """What follows from an ending, and the counts after it."""
    row = next(row for row in ENDINGS if row.applies(case))
    return Ending(row.phase, row.reason(case), case.end.progress, row.blames(case)), row.counts(case.counts_after)


_EARLY = dict.fromkeys(STOPS, Phase.PREEMPTED) | {
    MailKind.CANCEL: Phase.CANCELLED,
    MailKind.MACHINE_LOST: Phase.PENDING,
}
EARLY_PHASES = frozenset(_EARLY.values())
"""The phases of attempts that were told to stop before any task was started."""


def stopped_early(told: Mail) -> Ending:
    """Told to stop before any task was started."""
    return Ending(_EARLY[MailKind(told.kind)], Reason(code_of(told), told.detail), (), lost_machine(told))


def unless_completed(otherwise: Ending, end: GangEnd, plan: LaunchPlan) -> Ending:
    """`otherwise`, with what the tasks reported; but tasks that had all succeeded before they were stopped have."""
    if end.all_succeeded:
        return Ending(Phase.SUCCEEDED, completed(plan), end.progress)
    return replace(otherwise, progress=end.progress)
