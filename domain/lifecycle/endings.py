"""Decides the consequence of the end of an attempt: a decision table, whose first matching row applies."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from domain.ids import task_log
from domain.lifecycle.checkpoint_load import FailedLoad, failed_load, loaded
from domain.lifecycle.gangs import GangEnd
from domain.lifecycle.retry_limits import RetryLimit, exit_status
from domain.lifecycle.suspicion import MOST_ATTEMPTS, NONE, Doubt, Suspicion, doubt
from domain.phases import TERMINAL_PHASES, Phase
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from domain.protocol.workloads import LaunchPlan
from domain.reasons import Reason, ReasonCode
from domain.task_reports import TaskProgress

HANGS_IN_A_ROW = 3
"""A workload fails after this many consecutive attempts that hung without completing a step."""
UNLOADABLE_IN_A_ROW = 2
"""A workload fails after this many consecutive attempts that could not load a checkpoint: every restart would fail in
the same way."""
STOP_REASONS = {
    MessageKind.EVICT: ReasonCode.EVICTED,
    MessageKind.PREEMPT: ReasonCode.PREEMPTED_BY_OPERATOR,
    MessageKind.MACHINE_LOST: ReasonCode.MACHINE_LOST,
    MessageKind.HUNG: ReasonCode.NO_PROGRESS,
    MessageKind.CANCEL: ReasonCode.CANCELLED_BY_USER,
}
STOPS = frozenset(STOP_REASONS)
"""The kinds of messages that stop an attempt."""
STOPS_EARLY = STOPS | {MessageKind.FINISHED}
"""The kinds of messages that stop an attempt that has no tasks yet."""


@dataclass(frozen=True)
class FailureCounts:
    """Counts of failures over the attempts of a workload."""

    failures: int = 0
    """Failures of the user's tasks, in total."""
    hangs: int = 0
    """Consecutive attempts that hung."""
    unloadable: int = 0
    """Consecutive attempts whose checkpoint could not be loaded. Attempts that never reached loading do not count."""
    suspicion: Suspicion = NONE
    """Failures on machines that owners lend, which are not confirmed."""
    by_exit: Mapping[str, int] = field(default_factory=dict)
    """Like `failures`, but counted separately by exit status."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: the phase that follows, the reason, and the last reports of its tasks."""

    phase: Phase
    reason: Reason
    progress: tuple[TaskProgress, ...] = ()
    blames_machine: str | None = None
    flushing_s: float | None = None
    """The time that the tasks, which still run, have to save, in seconds; None: no task runs."""


@dataclass(frozen=True)
class EndedAttempt:
    """The facts about the end of an attempt on which the decision depends."""

    end: GangEnd
    plan: LaunchPlan
    counts: FailureCounts
    """The counts before this ending."""
    workload_id: str
    attempt: int
    ran_s: float
    """Seconds of running, summed over all attempts."""
    told: WorkloadMessage | None = None
    """The message that stopped the attempt, if any."""
    timed_out: bool = False
    """Whether the maximum runtime is used up."""
    repeats: bool = True
    """Whether the workload can have another attempt; a replica of a service has only one."""

    @cached_property
    def noticed(self) -> Reason | None:
        """The platform's notice that it reclaims a machine; None: there is none, or a message stopped the gang."""
        return self.end.noticed if self.told is None else None

    @cached_property
    def own(self) -> bool:
        """Whether the gang ended by itself: not by a message, a notice, a lost machine or a refusal."""
        end = self.end
        return self.told is None and self.noticed is None and end.lost_machine is None and end.refused is None

    @cached_property
    def failed_load(self) -> FailedLoad | None:
        """The task that could not load its checkpoint, if any."""
        return _failed_load(self.end, self.own)

    @cached_property
    def counts_after(self) -> FailureCounts:
        """The counts after the tasks' reports are applied. They are the same for every row of the table."""
        counts = self.counts
        if _advanced(self.end):
            counts = replace(counts, hangs=0)
        counts = replace(counts, suspicion=unless_cleared(counts.suspicion, self.end, self.plan))
        if self.end.all_succeeded or self.is_told(MessageKind.CANCEL) or self.timed_out:
            return counts
        return count_loads(counts, self.end, self.own)

    @cached_property
    def limit(self) -> RetryLimit:
        """The limit that applies to the failure of the user's task."""
        named, before, failed = self.plan.retries_by_exit, self.counts, self.end.first_failure
        status = exit_status(failed.status)
        if status in named:
            return RetryLimit(named[status], before.by_exit.get(status, 0) + failed.restarts, status)
        others = before.failures - sum(before.by_exit.get(one, 0) for one in named)
        return RetryLimit(self.plan.retries, others + failed.restarts)

    @cached_property
    def doubt(self) -> Doubt | None:
        """The doubt about a failure for which the workload would be to blame; None: the failure is confirmed."""
        if not self.repeats:
            return None
        return doubt(self.counts.suspicion, _lent(self.plan), self.end.first_failure.machine)

    def is_told(self, kind: MessageKind) -> bool:
        """Returns whether a message of this kind stopped the attempt."""
        return self.told is not None and self.told.kind == kind

    @cached_property
    def is_unloadable(self) -> bool:
        """Whether a checkpoint could not be loaded, and either that ended the attempt or the limit is reached."""
        if self.failed_load is None:
            return False
        return self.own or self.counts_after.unloadable >= UNLOADABLE_IN_A_ROW


@dataclass(frozen=True)
class EndingFields:
    """A row of the decision table."""

    name: str
    applies: Callable[[EndedAttempt], bool]
    phase: Phase
    reason: Callable[[EndedAttempt], Reason]
    counts: Callable[[EndedAttempt], FailureCounts] = lambda case: case.counts_after
    blames: Callable[[EndedAttempt], str | None] = lambda case: None
    confirmed: bool = False
    """Whether the row applies only to confirmed failures (`domain.lifecycle.suspicion`). If a failure is not confirmed,
    the workload is queued again and nothing is counted."""


def _failed_load(end: GangEnd, own: bool) -> FailedLoad | None:
    return failed_load(end.progress, end.first_failure.name if own else None, end.first_failure.status)


def _lent(plan: LaunchPlan) -> list[str]:
    return [node.machine for node in plan.nodes if node.lent]


def _advanced(end: GangEnd) -> bool:
    return any(p.step is not None and p.step > (p.resumed_step or 0) for p in end.progress)


def unless_cleared(before: Suspicion, end: GangEnd, plan: LaunchPlan) -> Suspicion:
    """Returns the suspicion after an attempt: none if its tasks made steps forward without any of the suspects.

    The attempt may have ended in any way.
    """
    works_without = _advanced(end) and not set(_lent(plan)).intersection(before.machines)
    return NONE if works_without else before


def count_loads(counts: FailureCounts, end: GangEnd, own: bool) -> FailureCounts:
    """Returns the counts after an attempt, with its failed or successful load applied.

    A failed load does not count as a failure of the user's tasks: a store that did not answer may answer next time. A
    successful load resets the count of consecutive failed loads. `own`: see `EndedAttempt.own`.
    """
    if _failed_load(end, own) is not None:
        return replace(counts, unloadable=counts.unloadable + 1)
    return replace(counts, unloadable=0) if loaded(end.progress) else counts


def code_of(message: WorkloadMessage) -> ReasonCode:
    """Returns the reason code of a message that stops an attempt: `code` in its detail, else its kind's default."""
    code = message.detail.get("code")
    return ReasonCode(code) if code is not None else STOP_REASONS[MessageKind(message.kind)]


def lost_machine(message: WorkloadMessage | None) -> str | None:
    """Returns the machine that the message reports as lost; None: it is about something else."""
    return str(message.detail["machine"]) if message is not None and message.kind == MessageKind.MACHINE_LOST else None


def completed(plan: LaunchPlan) -> Reason:
    """Returns the reason for a gang whose tasks have all succeeded."""
    return Reason(ReasonCode.COMPLETED, {"tasks": plan.tasks})


def why_stopped(told: WorkloadMessage | None, plan: LaunchPlan, ran_s: float) -> Reason:
    """Returns why an attempt is stopped: the reason of the message `told`; None: the runtime is used up."""
    if told is not None:
        return Reason(code_of(told), told.detail)
    return Reason(ReasonCode.MAX_RUNTIME, {"ran_s": round(ran_s, 3), "limit_s": plan.max_runtime_s})


def _completed(case: EndedAttempt) -> Reason:
    return completed(case.plan)


def _cancelled(case: EndedAttempt) -> Reason:
    assert case.told is not None
    return Reason(ReasonCode.CANCELLED_BY_USER, case.told.detail)


def _as_told(case: EndedAttempt) -> Reason:
    return why_stopped(case.told, case.plan, case.ran_s)


def _unloadable(case: EndedAttempt) -> Reason:
    failed = case.failed_load
    assert failed is not None
    detail: dict[str, Any] = {"task": failed.task, "error": failed.error, "skipped": failed.skipped}
    detail |= {"failures": case.counts_after.unloadable, "limit": UNLOADABLE_IN_A_ROW}
    return Reason(ReasonCode.CHECKPOINT_UNLOADABLE, detail)


def _noticed(case: EndedAttempt) -> Reason:
    assert case.noticed is not None
    return case.noticed


def _lost(case: EndedAttempt) -> Reason:
    if case.is_told(MessageKind.MACHINE_LOST) and lost_machine(case.told) == case.end.lost_machine:
        return _as_told(case)  # The message may say why the machine counts as lost.
    return Reason(ReasonCode.MACHINE_LOST, {"machine": case.end.lost_machine})


def _refused(case: EndedAttempt) -> Reason:
    assert case.end.refused is not None
    return case.end.refused.reason


FAILURES = frozenset(
    {
        ReasonCode.TASK_FAILED,
        ReasonCode.RETRIES_EXHAUSTED,
        ReasonCode.OUT_OF_MEMORY,
        ReasonCode.OUT_OF_DISK,
        ReasonCode.SETUP_FAILED,
        ReasonCode.SAVES_FAILED,
        ReasonCode.NOT_READY,
    }
)
"""The reasons of attempts that count as failures of the user's tasks."""


def _failed(case: EndedAttempt) -> Reason:
    failed = case.end.first_failure
    detail: dict[str, Any] = {"task": failed.name, "status": failed.status, "retries": case.limit.retries}
    final = case.limit.is_reached
    if case.limit.status is not None:
        detail["exit"] = case.limit.status
    code = ReasonCode.RETRIES_EXHAUSTED if final else ReasonCode.TASK_FAILED
    if "/" in failed.name:
        detail["log"] = task_log(case.workload_id, case.attempt, failed.name)
    if failed.in_setup:
        code = ReasonCode.SETUP_FAILED
    gave_up = next((p.failing for p in case.end.progress if f"{p.job}/{p.task}" == failed.name), None)
    if gave_up is not None and gave_up.limit is not None:
        detail |= {"error": f"{gave_up.error}; {gave_up.limit}", "saves": gave_up.failures}
        code = ReasonCode.SAVES_FAILED
    if failed.not_ready is not None:
        detail |= {"limit_s": failed.not_ready.limit_s, "error": failed.not_ready.error}
        code = ReasonCode.NOT_READY
    if failed.disk is not None:
        detail |= {"machine": failed.machine, **asdict(failed.disk)}
        code = ReasonCode.OUT_OF_DISK
    if failed.memory is not None:
        detail |= failed.memory
        code = ReasonCode.OUT_OF_MEMORY
    if not final:
        detail["failures"] = case.limit.used + 1
    assert code in FAILURES, f"{code} must be in FAILURES, by which a new workflow counts earlier failures"
    return Reason(code, detail)


def _one_failure_more(case: EndedAttempt) -> FailureCounts:
    counts, status = case.counts_after, exit_status(case.end.first_failure.status)
    by_exit = {**counts.by_exit, status: counts.by_exit.get(status, 0) + 1}
    return replace(counts, failures=counts.failures + 1, by_exit=by_exit)


def _one_hang_more(case: EndedAttempt) -> FailureCounts:
    return replace(case.counts_after, hangs=case.counts_after.hangs + 1)


def _no_hang(case: EndedAttempt) -> FailureCounts:
    return replace(case.counts_after, hangs=0)


ENDINGS = (
    EndingFields("all tasks succeeded", lambda case: case.end.all_succeeded, Phase.SUCCEEDED, _completed),
    EndingFields("cancelled", lambda case: case.is_told(MessageKind.CANCEL), Phase.CANCELLED, _cancelled),
    EndingFields("maximum runtime used up", lambda case: case.timed_out, Phase.FAILED, _as_told),
    EndingFields(
        "checkpoint unloadable again",
        lambda case: case.is_unloadable and case.counts_after.unloadable >= UNLOADABLE_IN_A_ROW,
        Phase.FAILED,
        _unloadable,
        confirmed=True,
    ),
    EndingFields("checkpoint unloadable", lambda case: case.is_unloadable, Phase.PENDING, _unloadable),
    EndingFields(
        "platform reclaims a machine", lambda case: case.noticed is not None, Phase.PREEMPTED, _noticed, _no_hang
    ),
    EndingFields(
        "machine lost, seen by the workflow",
        lambda case: case.end.lost_machine is not None,
        Phase.PENDING,
        _lost,
        blames=lambda case: case.end.lost_machine,
    ),
    EndingFields(
        "launch refused",
        lambda case: case.told is None and case.end.refused is not None,
        Phase.PENDING,
        _refused,
        blames=lambda case: case.end.refused.blames_machine if case.end.refused is not None else None,
    ),
    EndingFields(
        "stopped by an earlier workflow",
        lambda case: case.told is None and case.end.stopped_before,
        Phase.PREEMPTED,
        lambda case: Reason(ReasonCode.STACK_STOPPED),
    ),
    EndingFields(
        "task failed, no retry left",
        lambda case: case.told is None and case.limit.is_reached,
        Phase.FAILED,
        _failed,
        _one_failure_more,
        confirmed=True,
    ),
    EndingFields(
        "task failed", lambda case: case.told is None, Phase.PENDING, _failed, _one_failure_more, confirmed=True
    ),
    EndingFields(
        "hung again",
        lambda case: case.is_told(MessageKind.HUNG) and case.counts_after.hangs + 1 >= HANGS_IN_A_ROW,
        Phase.FAILED,
        _as_told,
        _one_hang_more,
        confirmed=True,
    ),
    EndingFields("hung", lambda case: case.is_told(MessageKind.HUNG), Phase.PENDING, _as_told, _one_hang_more),
    EndingFields(
        "machine lost, reported by message",
        lambda case: case.is_told(MessageKind.MACHINE_LOST),
        Phase.PENDING,
        _as_told,
        _no_hang,
        blames=lambda case: lost_machine(case.told),
    ),
    EndingFields("stopped by other message", lambda case: True, Phase.PREEMPTED, _as_told, _no_hang),
)
"""The rows in order of precedence. Other causes of a task's failure come before the row that blames the user's task."""


def judge(case: EndedAttempt) -> tuple[Ending, FailureCounts]:
    """Returns the consequence of the end of an attempt, and the new counts of failures."""
    row = next(row for row in ENDINGS if row.applies(case))
    if row.confirmed and case.doubt is not None:
        reason = unconfirmed(row.reason(case), case.doubt)
        return Ending(Phase.PENDING, reason, case.end.progress), replace(case.counts_after, suspicion=case.doubt.after)
    counts = row.counts(case)
    if row.confirmed:
        counts = replace(counts, suspicion=NONE)
    return Ending(row.phase, row.reason(case), case.end.progress, row.blames(case)), counts


_IF_TRIED_AGAIN = {
    ReasonCode.RETRIES_EXHAUSTED: ReasonCode.TASK_FAILED,
    ReasonCode.CANNOT_START: ReasonCode.LAUNCH_FAILED,
}
"""Reasons whose sentences say that there is no further attempt, and those that describe the same failure without it."""


def unconfirmed(reason: Reason, doubtful: Doubt) -> Reason:
    """Returns the reason for which a workload is tried again whose failure, for `reason`, is not confirmed."""
    after = doubtful.after
    words = Reason(_IF_TRIED_AGAIN.get(reason.code, reason.code), reason.detail).sentence
    detail: dict[str, Any] = {"avoided": list(doubtful.avoided), "suspects": list(after.machines)}
    detail |= {"attempts": after.attempts, "limit": MOST_ATTEMPTS, "cause": reason.code.value, "words": words}
    if "log" in reason.detail:
        detail["log"] = reason.detail["log"]
    return Reason(ReasonCode.UNCONFIRMED_FAILURE, detail)


_EARLY = dict.fromkeys(STOPS, Phase.PREEMPTED) | {
    MessageKind.CANCEL: Phase.CANCELLED,
    MessageKind.MACHINE_LOST: Phase.PENDING,
    MessageKind.FINISHED: Phase.SUCCEEDED,
}
EARLY_PHASES = frozenset(_EARLY.values())
"""The phases that may follow if an attempt is stopped before any task was started."""


def stopped_early(told: WorkloadMessage) -> Ending:
    """Returns the ending of an attempt that the message `told` stopped before any task was started."""
    return Ending(_EARLY[MessageKind(told.kind)], Reason(code_of(told), told.detail), (), lost_machine(told))


def final(end: Ending) -> Ending:
    """Returns the ending of the only attempt of a workload (`WorkloadSpec.one_attempt`): it is not queued again."""
    return end if end.phase in TERMINAL_PHASES else replace(end, phase=Phase.FAILED)


def unless_completed(otherwise: Ending, end: GangEnd, plan: LaunchPlan) -> Ending:
    """Returns success if all tasks succeeded before they were stopped, else `otherwise` with the tasks' reports."""
    if end.all_succeeded:
        return Ending(Phase.SUCCEEDED, completed(plan), end.progress)
    return replace(otherwise, progress=end.progress)
