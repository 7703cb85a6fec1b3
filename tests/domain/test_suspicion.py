"""Failures on machines that owners lend: when they count against the workload, and what follows until then."""

from dataclasses import replace
from itertools import product

import pytest

from domain.lifecycle.endings import EndedAttempt, FailureCounts, judge
from domain.lifecycle.gangs import GangEnd, TaskFailure
from domain.lifecycle.suspicion import NONE, Suspicion, doubt
from domain.phases import Phase
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from domain.protocol.workloads import LaunchPlan, NodeLaunch, WorkloadInput
from domain.reasons import ReasonCode
from domain.task_reports import LoadReport, TaskProgress
from workflows.verdicts import Verdicts


@pytest.mark.parametrize(
    ("before", "lent", "reporter", "avoided", "after"),
    [
        # No lent machine took part: the failure is confirmed.
        (NONE, [], "r", None, None),
        # The first failure on lent machines: all of them are suspects, and the one that reported it is avoided.
        (NONE, ["a"], "a", ("a",), Suspicion(("a",), 1)),
        (NONE, ["b", "a"], "b", ("b",), Suspicion(("a", "b"), 1)),
        # A machine that is not lent reports it, or nobody: the first suspect is avoided.
        (NONE, ["b", "a"], "r", ("a",), Suspicion(("a", "b"), 1)),
        (NONE, ["b", "a"], None, ("a",), Suspicion(("a", "b"), 1)),
        # Another machine says the same: no single one can have caused both failures.
        (Suspicion(("a",), 1), ["b"], "b", None, None),
        (Suspicion(("a",), 1), [], "r", None, None),
        # A machine of both gangs can have caused both, also if its peers reported them: all such machines are avoided.
        (Suspicion(("a", "b"), 1), ["a", "c"], "c", ("a",), Suspicion(("a",), 2)),
        (Suspicion(("a", "b", "c"), 1), ["c", "d", "a"], "c", ("a", "c"), Suspicion(("a", "c"), 2)),
        (Suspicion(("a",), 1), ["a"], "a", ("a",), Suspicion(("a",), 2)),
        # The number of attempts is bounded.
        (Suspicion(("a",), 2), ["a"], "a", None, None),
    ],
)
def test_when_a_failure_counts(
    before: Suspicion, lent: list[str], reporter: str | None, avoided: tuple[str, ...] | None, after: Suspicion | None
) -> None:
    """A failure counts if no single lent machine took part in all failed attempts, or after the third attempt."""
    found = doubt(before, lent, reporter)
    assert (avoided, after) == (None, None) if found is None else (found.avoided, found.after) == (avoided, after)


@pytest.mark.parametrize("hostile", "abcdefg")
def test_one_hostile_machine_ends_no_workload(hostile: str) -> None:
    """It makes its gangs of three fail, whichever member reports it. A gang without it runs before a failure counts."""
    for reporters in product(range(3), repeat=3):
        before, avoided = NONE, set[str]()
        for reporter in reporters:
            gang = [machine for machine in "abcdefg" if machine not in avoided][:3]
            if hostile not in gang:
                break
            found = doubt(before, gang, gang[reporter])
            assert found is not None, (reporters, gang)
            before, avoided = found.after, avoided | set(found.avoided)
        else:
            pytest.fail(f"all gangs contained the machine: {reporters}")


NODES = [NodeLaunch("m1", [], {}, True), NodeLaunch("m2", [], {}, True)]
PLAN = LaunchPlan("east", "file:///b", "launch", NODES, 2, None, 30.0, 3600.0, 0, 10.0, 30.0)
FAILED = GangEnd(False, None, TaskFailure("main/1", "exit code 3", machine="m2"), failed=True)
UNLOADED = replace(FAILED, progress=(TaskProgress("main", 1, load=LoadReport("failed", "bad checksum", 2)),))
HUNG = WorkloadMessage(1, MessageKind.HUNG, 5, {"silent_s": 60, "limit_s": 50})


NO_COUNTS = FailureCounts()


def case(
    end: GangEnd = FAILED,
    plan: LaunchPlan = PLAN,
    counts: FailureCounts = NO_COUNTS,
    told: WorkloadMessage | None = None,
) -> EndedAttempt:
    return EndedAttempt(end, plan, counts, "wl-1", 5, 100.0, told)


@pytest.mark.parametrize(
    ("of", "cause"),
    [
        (case(), ReasonCode.RETRIES_EXHAUSTED),
        (case(plan=replace(PLAN, retries=3)), ReasonCode.TASK_FAILED),
        (case(UNLOADED, counts=FailureCounts(unloadable=1)), ReasonCode.CHECKPOINT_UNLOADABLE),
        (case(counts=FailureCounts(hangs=2), told=HUNG), ReasonCode.NO_PROGRESS),
    ],
    ids=["exit", "exit with retries", "unloadable", "hung"],
)
def test_a_failure_that_is_not_confirmed_counts_nothing(of: EndedAttempt, cause: ReasonCode) -> None:
    """It returns to the queue, uses up no retry and blames no machine; on other machines the same failure counts."""
    ending, counts = judge(of)
    assert (ending.phase, ending.reason.code, ending.blames_machine) == (
        Phase.PENDING, ReasonCode.UNCONFIRMED_FAILURE, None,
    )  # fmt: skip
    assert (ending.reason.detail["cause"], counts.failures) == (cause.value, 0)
    assert (ending.reason.detail["suspects"], counts.suspicion) == (["m1", "m2"], Suspicion(("m1", "m2"), 1))
    elsewhere = replace(of.plan, nodes=[NodeLaunch("m3", [], {}, True)])
    again, after = judge(replace(of, plan=elsewhere, counts=counts))
    assert (again.reason.code, after.suspicion) == (cause, NONE)


def test_work_without_the_suspects_clears_them() -> None:
    """After steps forward on other machines, an earlier failure confirms no later one of the same machine."""
    before = FailureCounts(suspicion=Suspicion(("m9",), 2))
    steps = replace(FAILED, progress=(TaskProgress("main", 0, step=7, resumed_step=3),))
    evicted = WorkloadMessage(1, MessageKind.EVICT, 5, {})
    assert judge(case(steps, counts=before, told=evicted))[1].suspicion == NONE
    assert judge(case(counts=before, told=evicted))[1] == before
    suspects = FailureCounts(suspicion=Suspicion(("m1",), 2))
    assert judge(case(steps, counts=suspects, told=evicted))[1] == suspects


def test_the_reason_says_what_follows() -> None:
    """It does not say that the workload has ended, and not that only lent machines report the failure."""
    assert judge(case())[0].reason.sentence == (
        "task main/1 ended with exit code 3; a machine that its owner lends may be the cause, so the failure does not"
        " count, and the workload is tried again without m2 (1 of at most 3 attempts in a row)"
    )


@pytest.mark.parametrize(
    ("suspects", "machine", "after"),
    [(("m9",), "m1", NONE), (("m1",), "m1", Suspicion(("m1",), 1)), (("m8",), "m1", Suspicion(("m8",), 1))],
    ids=["without the suspect", "with the suspect", "a later attempt has failed"],
)
def test_steps_until_the_last_save_count(suspects: tuple[str, ...], machine: str, after: Suspicion) -> None:
    """Tasks whose workload was queued again while they saved clear the suspects that there were then, and no others."""
    state = WorkloadInput("wl-1", suspects=list(suspects), unconfirmed=1)
    left = Suspicion(("m9",), 1) if suspects == ("m8",) else Suspicion(suspects, 1)
    steps = replace(FAILED, failed=False, progress=(TaskProgress("main", 0, step=7, resumed_step=3),))
    Verdicts(state).count_late(steps, replace(PLAN, nodes=[NodeLaunch(machine, [], {}, True)]), left)
    assert Suspicion(tuple(state.suspects), state.unconfirmed) == after


def test_a_replica_has_no_second_attempt() -> None:
    """The workload of a replica is not queued again: its service launches another replica."""
    assert judge(replace(case(), repeats=False))[0].phase is Phase.FAILED
