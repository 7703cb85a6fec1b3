"""Failures on machines that owners lend: when they count against the workload, and what follows until then."""

from dataclasses import replace

import pytest

from domain.phases import Phase
from domain.protocol import LaunchPlan, Mail, MailKind, NodeLaunch
from domain.reasons import ReasonCode
from domain.reported import LoadReport, TaskProgress
from lifecycle.endings import Case, Counts, judge
from lifecycle.gangs import Failure, GangEnd
from lifecycle.suspicion import NONE, Suspicion, doubt


@pytest.mark.parametrize(
    ("before", "lent", "reporter", "avoided", "after"),
    [
        # No lent machine took part: the failure is confirmed.
        (NONE, [], "r", None, None),
        # The first failure on lent machines: all of them are suspects, and the one that reported it is avoided.
        (NONE, ["a"], "a", "a", Suspicion(("a",), 1)),
        (NONE, ["b", "a"], "b", "b", Suspicion(("a", "b"), 1)),
        # A machine that is not lent reports it, or nobody: the first suspect is avoided.
        (NONE, ["b", "a"], "r", "a", Suspicion(("a", "b"), 1)),
        (NONE, ["b", "a"], None, "a", Suspicion(("a", "b"), 1)),
        # Another machine says the same: no single one can have caused both failures.
        (Suspicion(("a",), 1), ["b"], "b", None, None),
        (Suspicion(("a",), 1), [], "r", None, None),
        # A machine of both gangs can have caused both, also if its peers reported them.
        (Suspicion(("a", "b"), 1), ["a", "c"], "c", "a", Suspicion(("a",), 2)),
        (Suspicion(("a",), 1), ["a"], "a", "a", Suspicion(("a",), 2)),
        # The number of attempts is bounded.
        (Suspicion(("a",), 2), ["a"], "a", None, None),
    ],
)
def test_when_a_failure_counts(
    before: Suspicion, lent: list[str], reporter: str | None, avoided: str | None, after: Suspicion | None
) -> None:
    """A failure counts if no single lent machine took part in all failed attempts, or after the third attempt."""
    found = doubt(before, lent, reporter)
    assert (avoided, after) == (None, None) if found is None else (found.avoided, found.after) == (avoided, after)


NODES = [NodeLaunch("m1", [], True), NodeLaunch("m2", [], True)]
PLAN = LaunchPlan("east", "file:///b", "launch", NODES, 2, None, 30.0, 3600.0, 0, 10.0, 30.0)
FAILED = GangEnd(False, None, Failure("main/1", "exit code 3", machine="m2"), failed=True)
UNLOADED = replace(FAILED, progress=(TaskProgress("main", 1, load=LoadReport("failed", "bad checksum", 2)),))
HUNG = Mail(1, MailKind.HUNG, 5, {"silent_s": 60, "limit_s": 50})


NO_COUNTS = Counts()


def case(end: GangEnd = FAILED, plan: LaunchPlan = PLAN, counts: Counts = NO_COUNTS, told: Mail | None = None) -> Case:
    return Case(end, plan, counts, "wl-1", 5, 100.0, told)


@pytest.mark.parametrize(
    ("of", "cause"),
    [
        (case(), ReasonCode.RETRIES_EXHAUSTED),
        (case(plan=replace(PLAN, retries=3)), ReasonCode.TASK_FAILED),
        (case(UNLOADED, counts=Counts(unloadable=1)), ReasonCode.CHECKPOINT_UNLOADABLE),
        (case(counts=Counts(hangs=2), told=HUNG), ReasonCode.NO_PROGRESS),
    ],
    ids=["exit", "exit with retries", "unloadable", "hung"],
)
def test_a_failure_that_is_not_confirmed_counts_nothing(of: Case, cause: ReasonCode) -> None:
    """It returns to the queue, uses up no retry and blames no machine; on other machines the same failure counts."""
    ending, counts = judge(of)
    assert (ending.phase, ending.reason.code, ending.blames_machine) == (
        Phase.PENDING, ReasonCode.UNCONFIRMED_FAILURE, None,
    )  # fmt: skip
    assert (ending.reason.detail["cause"], counts.failures) == (cause.value, 0)
    assert (ending.reason.detail["suspects"], counts.suspicion) == (["m1", "m2"], Suspicion(("m1", "m2"), 1))
    elsewhere = replace(of.plan, nodes=[NodeLaunch("m3", [], True)])
    again, after = judge(replace(of, plan=elsewhere, counts=counts))
    assert (again.reason.code, after.suspicion) == (cause, NONE)


def test_work_without_the_suspects_clears_them() -> None:
    """After steps forward on other machines, an earlier failure confirms no later one of the same machine."""
    before = Counts(suspicion=Suspicion(("m9",), 2))
    steps = replace(FAILED, progress=(TaskProgress("main", 0, step=7, resumed_step=3),))
    evicted = Mail(1, MailKind.EVICT, 5, {})
    assert judge(case(steps, counts=before, told=evicted))[1].suspicion == NONE
    assert judge(case(counts=before, told=evicted))[1] == before
    suspects = Counts(suspicion=Suspicion(("m1",), 2))
    assert judge(case(steps, counts=suspects, told=evicted))[1] == suspects


def test_a_replica_has_no_second_attempt() -> None:
    """The workload of a replica is not queued again: its service launches another replica."""
    assert judge(replace(case(), repeats=False))[0].phase is Phase.FAILED
