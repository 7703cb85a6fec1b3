"""The endings table of attempts: one example for each row, and the precedence of the rows."""

from dataclasses import replace
from typing import Any

import pytest

from domain.lifecycle.endings import ENDINGS, EndedAttempt, FailureCounts, count_loads, judge, stopped_early
from domain.lifecycle.gangs import GangEnd, LaunchFailure, TaskFailure
from domain.phases import Phase
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from domain.protocol.workloads import LaunchPlan
from domain.reasons import Reason, ReasonCode
from domain.task_reports import DiskReport, FailingReport, LoadReport, NotReadyReport, TaskProgress

PLAN = LaunchPlan("east", "file:///b", "launch", [], 4, None, 30.0, 3600.0, 1, 10.0, 30.0)
FAILED = GangEnd(False, None, TaskFailure("main/2", "exit code 3"), failed=True)
NOTICE = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": "m", "platform": "aws"})
REFUSED = LaunchFailure(Reason(ReasonCode.LAUNCH_FAILED, {"machine": "m", "error": "no port"}), "m")
STEPS = TaskProgress("main", 0, step=7, resumed_step=3)
UNLOADED = TaskProgress("main", 1, load=LoadReport("failed", "bad checksum", 2))
LOADED = TaskProgress("main", 1, load=LoadReport("loaded"))


def mail(kind: MessageKind, **detail: Any) -> WorkloadMessage:
    return WorkloadMessage(1, kind, 5, detail)


def case(end: GangEnd = FAILED, **changes: Any) -> EndedAttempt:
    return replace(EndedAttempt(end, PLAN, FailureCounts(), "wl-1", 5, 100.0), **changes)


LOST = mail(MessageKind.MACHINE_LOST, machine="m")
HUNG = mail(MessageKind.HUNG, silent_s=60, limit_s=50)
EVICTED = mail(MessageKind.EVICT, evictor="wl-2")
CANCELLED = mail(MessageKind.CANCEL, by="key-1")
# Row, example, next phase, reason code, and the counts (failures, hangs, unloadable) after the ending; they are
# (1, 2, 1) before it, unless the case sets them.
BEFORE = FailureCounts(1, 2, 1)
EXAMPLES: list[tuple[str, EndedAttempt, Phase, ReasonCode, FailureCounts]] = [
    (
        "all tasks succeeded",
        case(GangEnd(True, None, TaskFailure("?", "?"))),
        Phase.SUCCEEDED,
        ReasonCode.COMPLETED,
        BEFORE,
    ),
    ("cancelled", case(told=CANCELLED), Phase.CANCELLED, ReasonCode.CANCELLED_BY_USER, BEFORE),
    ("maximum runtime used up", case(timed_out=True), Phase.FAILED, ReasonCode.MAX_RUNTIME, BEFORE),
    (
        "checkpoint unloadable again",
        case(replace(FAILED, progress=(UNLOADED,))),
        Phase.FAILED,
        ReasonCode.CHECKPOINT_UNLOADABLE,
        FailureCounts(1, 2, 2),
    ),
    (
        "checkpoint unloadable",
        case(replace(FAILED, progress=(UNLOADED,)), counts=FailureCounts()),
        Phase.PENDING,
        ReasonCode.CHECKPOINT_UNLOADABLE,
        FailureCounts(0, 0, 1),
    ),
    (
        "platform reclaims a machine",
        case(replace(FAILED, noticed=NOTICE)),
        Phase.PREEMPTED,
        ReasonCode.PLATFORM_NOTICE,
        FailureCounts(1, 0, 1),
    ),
    (
        "machine lost, seen by the workflow",
        case(replace(FAILED, lost_machine="m")),
        Phase.PENDING,
        ReasonCode.MACHINE_LOST,
        BEFORE,
    ),
    ("launch refused", case(replace(FAILED, refused=REFUSED)), Phase.PENDING, ReasonCode.LAUNCH_FAILED, BEFORE),
    (
        "stopped by an earlier workflow",
        case(replace(FAILED, stopped_before=True)),
        Phase.PREEMPTED,
        ReasonCode.STACK_STOPPED,
        BEFORE,
    ),
    (
        "task failed, no retry left",
        case(),
        Phase.FAILED,
        ReasonCode.RETRIES_EXHAUSTED,
        FailureCounts(2, 2, 1, by_exit={"3": 1}),
    ),
    (
        "task failed",
        case(counts=FailureCounts(0, 2, 1)),
        Phase.PENDING,
        ReasonCode.TASK_FAILED,
        FailureCounts(1, 2, 1, by_exit={"3": 1}),
    ),
    ("hung again", case(told=HUNG), Phase.FAILED, ReasonCode.NO_PROGRESS, FailureCounts(1, 3, 1)),
    (
        "hung",
        case(told=HUNG, counts=FailureCounts(1, 1, 1)),
        Phase.PENDING,
        ReasonCode.NO_PROGRESS,
        FailureCounts(1, 2, 1),
    ),
    (
        "machine lost, reported by message",
        case(told=LOST),
        Phase.PENDING,
        ReasonCode.MACHINE_LOST,
        FailureCounts(1, 0, 1),
    ),
    ("stopped by other message", case(told=EVICTED), Phase.PREEMPTED, ReasonCode.EVICTED, FailureCounts(1, 0, 1)),
]


@pytest.mark.parametrize(("row", "of", "phase", "code", "counts"), EXAMPLES, ids=[one[0] for one in EXAMPLES])
def test_each_row(row: str, of: EndedAttempt, phase: Phase, code: ReasonCode, counts: FailureCounts) -> None:
    """The first row that applies is the expected one, with its phase, reason, counts and blame."""
    of = of if of.counts != FailureCounts() or row == "checkpoint unloadable" else replace(of, counts=BEFORE)
    assert next(one.name for one in ENDINGS if one.applies(of)) == row
    ending, after = judge(of)
    assert (ending.phase, ending.reason.code, after) == (phase, code, counts)
    blamed = {"machine lost, seen by the workflow", "launch refused", "machine lost, reported by message"}
    assert ending.blames_machine == ("m" if row in blamed else None)


def test_every_row_has_an_example() -> None:
    """The examples cover the rows of the table in order."""
    assert [one[0] for one in EXAMPLES] == [row.name for row in ENDINGS]


@pytest.mark.parametrize("told", [None, EVICTED, HUNG, LOST, CANCELLED])
def test_a_gang_that_has_succeeded_has_succeeded(told: WorkloadMessage | None) -> None:
    """A gang whose tasks all exited with 0 has succeeded, whatever messages it got."""
    end = GangEnd(True, None, TaskFailure("?", "?"))
    assert judge(case(end, told=told, timed_out=True))[0].phase is Phase.SUCCEEDED


def test_a_step_ends_a_row_of_hangs() -> None:
    """A step forward resets the count of consecutive hangs."""
    end = replace(FAILED, progress=(STEPS,))
    assert judge(case(end, told=HUNG, counts=FailureCounts(0, 2, 0)))[1].hangs == 1
    assert judge(case(end, counts=FailureCounts(0, 2, 0)))[1].hangs == 0
    still = replace(FAILED, progress=(replace(STEPS, step=3),))
    assert judge(case(still, told=HUNG, counts=FailureCounts(0, 2, 0)))[0].phase is Phase.FAILED


def test_a_load_that_was_interrupted_ends_the_attempt_for_another_reason() -> None:
    """After an evicted attempt's failed load, the load counts, but the eviction is the reason.

    If it was the last allowed load, the workload fails.
    """
    end = replace(FAILED, progress=(UNLOADED,))
    ending, counts = judge(case(end, told=EVICTED))
    assert (ending.reason.code, counts.unloadable) == (ReasonCode.EVICTED, 1)
    assert judge(case(end, told=EVICTED, counts=FailureCounts(0, 0, 1)))[0].phase is Phase.FAILED


def test_a_load_that_succeeds_ends_the_row() -> None:
    """A successful load resets the count of failed loads, however the attempt ends."""
    end = replace(FAILED, progress=(LOADED,))
    assert judge(case(end, counts=FailureCounts(0, 0, 1)))[1].unloadable == 0
    assert count_loads(FailureCounts(0, 0, 1), end, False).unloadable == 0


def test_the_runtime_that_is_told_is_counted_once() -> None:
    """The reason's running time counts the attempt's own time once."""
    assert judge(case(timed_out=True, ran_s=3600.0))[0].reason.detail == {"ran_s": 3600.0, "limit_s": 3600.0}


@pytest.mark.parametrize(
    ("told", "phase", "blamed"),
    [(CANCELLED, Phase.CANCELLED, None), (LOST, Phase.PENDING, "m"), (EVICTED, Phase.PREEMPTED, None)],
)
def test_told_before_it_began(told: WorkloadMessage, phase: Phase, blamed: str | None) -> None:
    """A message before the start of tasks determines the ending."""
    ending = stopped_early(told)
    assert (ending.phase, ending.blames_machine) == (phase, blamed)


def test_a_task_that_was_never_ready_has_a_reason_of_its_own() -> None:
    """A task that did not become ready in time counts as a failure of the user's tasks, even during its setup."""
    not_ready = NotReadyReport(1200.0, "GET /health on port 21003: status 503")
    end = GangEnd(False, None, TaskFailure("main/0", "signal 15", in_setup=True, not_ready=not_ready), failed=True)
    ending, counts = judge(case(end))
    assert ending.reason.code is ReasonCode.NOT_READY
    assert ending.reason.sentence == (
        "task main/0 did not become ready within 1200.0 s, the limit in its readiness_probe;"
        " last probe: GET /health on port 21003: status 503"
    )
    assert (ending.phase, counts.failures) == (Phase.PENDING, 1)


def test_a_task_that_filled_the_disk_has_a_reason_of_its_own() -> None:
    """A task that used up its attempt's share of a machine's disk counts as a failure of the user's tasks."""
    disk = DiskReport(2_000_000_000, 1_000_000_000, 12, 10_000)
    failure = TaskFailure("main/0", "signal 9", disk=disk, machine="r/c/m1")
    ending, counts = judge(case(GangEnd(False, None, failure, failed=True)))
    assert ending.reason.code is ReasonCode.OUT_OF_DISK
    assert ending.reason.sentence == (
        "task main/0 ran out of disk space: the workload's tasks on r/c/m1 had 2000000000 of 1000000000 bytes,"
        " and 12 of 10000 files, which is their share"
    )
    assert (ending.phase, counts.failures) == (Phase.PENDING, 1)


def test_a_task_that_could_not_save_has_a_reason_of_its_own() -> None:
    """If a task ended because its saves reached a limit, the sentence says so; saves that only failed do not count."""
    for limit, code in (("max_failures is 2", ReasonCode.SAVES_FAILED), (None, ReasonCode.TASK_FAILED)):
        told = TaskProgress("main", 0, failing=FailingReport(3, 5.0, "step 7 was not saved: full", limit))
        end = GangEnd(False, None, TaskFailure("main/0", "exit code 1"), failed=True, progress=(told,))
        ending, counts = judge(case(end))
        assert (ending.reason.code, ending.phase, counts.failures) == (code, Phase.PENDING, 1)
        if limit:
            assert ending.reason.sentence == (
                "task main/0 ended with exit code 1 because its checkpoints could not be saved:"
                " step 7 was not saved: full; max_failures is 2"
            )


def test_a_failed_setup_has_a_reason_of_its_own() -> None:
    """A task that ended in its setup counts as a failure of the user's tasks, and the sentence names the setup."""
    end = GangEnd(False, None, TaskFailure("main/0", "exit code 7", in_setup=True), failed=True)
    ending, counts = judge(case(end))
    assert ending.reason.code is ReasonCode.SETUP_FAILED
    assert ending.reason.sentence == "setup of task main/0 failed with exit code 7"
    assert (ending.phase, counts.failures) == (Phase.PENDING, 1)
