"""The judge finds each kind of violation, and none in a correct run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.judge import KINDS, judge
from tests.chaos.observed import (
    Array,
    Element,
    Killed,
    Observed,
    Order,
    Owned,
    QueueSample,
    TaskRun,
    read_journals,
)
from tests.chaos.schedule import FAULTS, Elements, draw_schedule


def _run(attempt: int, begin_s: float, end_s: float, **changes: object) -> TaskRun:
    run = TaskRun("w1", attempt, "count", 0, "east/a/m-1", (0,), 1, 100 + attempt, begin_s, end_s, (begin_s + 0.5, 0))
    return replace(run, run_id=f"w1.{attempt}.count.0", **changes)  # type: ignore[arg-type]


def _sound() -> Observed:
    """Returns the observations of a correct run: one workload, preempted once and resumed from its checkpoint."""
    first = _run(1, 10.0, 20.0, saved=((15.0, 50), (19.0, 90)), preempted=True)
    second = _run(2, 25.0, 30.0, loaded=(25.5, 90), saved=((29.0, 120),), exit_code=0)
    order = Order("w", "key", 0, {"w1"})
    return Observed(runs=[first, second], orders=[order], phases={"w1": "succeeded"}, names={"w1": "w"})


def test_a_sound_run_has_no_violation() -> None:
    assert judge(_sound()) == []


def _twice(seen: Observed) -> None:
    seen.runs.append(replace(seen.runs[1], pid=999, machine="east/a/m-2"))


def _shared(seen: Observed) -> None:
    seen.runs[1] = replace(seen.runs[1], started_s=19.9)


def _disturbed(seen: Observed) -> None:
    seen.owned.append(Owned("east/a/m-1", (0, 3), 29.0, 29.5, 40.0))


def _older(seen: Observed) -> None:
    seen.runs[0] = replace(seen.runs[0], saved=((26.0, 60),), machine="east/a/m-2")


def _lost_step(seen: Observed) -> None:
    seen.runs[1] = replace(seen.runs[1], loaded=(25.5, 50))


def _again(seen: Observed) -> None:
    seen.runs[0] = replace(seen.runs[0], exit_code=0)


def _gone(seen: Observed) -> None:
    seen.phases.clear()
    seen.names.clear()


def _left_waiting(seen: Observed) -> None:
    seen.samples = [_queue(scans, "east") for scans in (7, 8, 10)]


def _queue(scans: int, *fits: str) -> QueueSample:
    return QueueSample(scans, frozenset(("w1", region) for region in fits))


def _endless(seen: Observed) -> None:
    seen.phases["w1"] = "running"


def _doubled(seen: Observed) -> None:
    seen.phases["w2"], seen.names["w2"] = "succeeded", "w"


def _false_success(seen: Observed) -> None:
    seen.runs[1] = replace(seen.runs[1], tasks=2)


def _false_failure(seen: Observed) -> None:
    seen.phases["w1"] = "failed"


def _late(seen: Observed) -> None:
    seen.orders[0].cancel_sent_s = seen.orders[0].cancelled_s = -200.0


def _outlived(seen: Observed) -> None:
    seen.left_behind = ["77: task.py"]


def _withheld(seen: Observed) -> None:
    seen.withheld = ["east/a/m-1: lost"]


def _down(seen: Observed) -> None:
    seen.stack_failures = ["the stack did not start again"]


def _refused(seen: Observed) -> None:
    seen.orders[0].refused = "422 no such thing"


def _dependent(seen: Observed, begin_s: float, condition: str = "succeeded") -> None:
    """Adds a workload that depends on the other one, and begins at a time."""
    seen.orders.append(Order("d", "key-d", 0, {"w2"}, after=("w", condition)))
    seen.runs.append(_run(1, begin_s, begin_s + 5, workload="w2", machine="east/a/m-3", exit_code=0))
    seen.phases["w2"], seen.names["w2"] = "succeeded", "d"


def _too_early(seen: Observed) -> None:
    _dependent(seen, 29.5)


def _array(seen: Observed, *held: tuple[float, float], finished_s: float = 51.0, **counts: int) -> None:
    """Adds an array of two elements, which hold slots at these times and run most of the time."""
    seen.orders.append(Order("a", "key-a", 0, {"w5"}, array=Elements(2, 1)))
    seen.phases["w5"], seen.names["w5"] = "succeeded", "a"
    elements = {index: Element("succeeded", "", (times,)) for index, times in enumerate(held)}
    seen.arrays["w5"] = Array(finished_s, {"succeeded": 2, "failed": 0, "cancelled": 0} | counts, elements)
    for index, (begin_s, end_s) in enumerate(held):
        seen.runs.append(_run(1, begin_s + 0.5, end_s - 0.5, workload=f"w5-{index}", slots=(3 + index,), exit_code=0))


def _crowded(seen: Observed) -> None:
    _array(seen, (40.0, 45.0), (44.9, 50.0))


def _with_runners(seen: Observed, *held: tuple[float, float], at_most_once: bool = False) -> None:
    """Adds an array of two elements, which runners execute that hold slots at these times."""
    _array(seen, (40.0, 45.0), (45.0, 50.0))
    seen.orders[-1].array = Elements(2, 1, "now", at_most_once)
    seen.arrays["w5"] = replace(seen.arrays["w5"], runners=held)


def _repeated(seen: Observed) -> None:
    _with_runners(seen, (40.0, 50.0), at_most_once=True)
    seen.runs[-1] = replace(seen.runs[-1], exit_code=None)
    seen.runs.append(_run(2, 46.5, 47.0, workload="w5-1", slots=(5,), exit_code=0))


def _miscounted(seen: Observed) -> None:
    _array(seen, (40.0, 45.0), (45.0, 50.0), succeeded=1)


def _ended_early(seen: Observed) -> None:
    _array(seen, (40.0, 45.0), (45.0, 50.0), finished_s=48.0)


def _nameless(seen: Observed) -> None:
    """Removes all responses: the workload is known only by its name."""
    _endless(seen)
    seen.orders[0].ids.clear()


BROKEN: dict[str, Callable[[Observed], None]] = {
    "started-twice": _twice,
    "slot-shared": _shared,
    "owner-disturbed": _disturbed,
    "older-saved": _older,
    "checkpoint-lost": _lost_step,
    "finished-again": _again,
    "throttle-exceeded": _crowded,
    "repeated": _repeated,
    "element-lost": _miscounted,
    "array-ended-early": _ended_early,
    "too-early": _too_early,
    "lost": _gone,
    "refused": _refused,
    "not-placed": _left_waiting,
    "never-ended": _endless,
    "duplicate": _doubled,
    "wrong-end": _false_success,
    "cancel-ignored": _late,
    "left-behind": _outlived,
    "withheld": _withheld,
    "stack": _down,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_is_seen(kind: str) -> None:
    seen = _sound()
    BROKEN[kind](seen)
    assert {v.kind for v in judge(seen)} == {kind}


def test_a_workload_whose_answers_were_lost_is_judged_by_its_name() -> None:
    seen = _sound()
    _nameless(seen)
    assert {v.kind for v in judge(seen)} == {"never-ended"}


def test_a_dependent_runs_after_the_success_of_the_other() -> None:
    seen = _sound()
    _dependent(seen, 30.5)
    assert judge(seen) == []
    seen = _sound()
    _dependent(seen, 5.0, "ended")
    assert judge(seen) == []


def test_the_elements_of_an_array_are_judged() -> None:
    seen = _sound()
    _array(seen, (40.0, 45.0), (45.0, 50.0))
    assert judge(seen) == []
    seen.runs.pop()
    assert [v.kind for v in judge(seen)] == ["wrong-end"]


def test_the_throttle_of_an_array_limits_its_runners() -> None:
    for begin_s, kinds in ((45.0, []), (44.0, ["throttle-exceeded"])):
        seen = _sound()
        _with_runners(seen, (40.0, 45.0), (begin_s, 50.0))
        assert [v.kind for v in judge(seen)] == kinds


def test_an_element_that_may_run_once_may_fail_without_its_end() -> None:
    for at_most_once, kinds in ((True, []), (False, ["wrong-end"])):
        seen = _sound()
        _with_runners(seen, (40.0, 50.0), at_most_once=at_most_once)
        seen.runs[-1] = replace(seen.runs[-1], exit_code=None)
        array = seen.arrays["w5"]
        failed = Element("failed", "{'code': 'at_most_once'}", ())
        seen.arrays["w5"] = replace(array, counts={"succeeded": 1, "failed": 1}, elements={**array.elements, 1: failed})
        assert [v.kind for v in judge(seen)] == kinds


def test_an_element_that_may_run_once_may_fail_because_it_was_killed() -> None:
    for killed, kinds in ((["w5-1.1.count.0"], []), ([], ["wrong-end"])):
        seen = _sound()
        _with_runners(seen, (40.0, 50.0), at_most_once=True)
        seen.runs[-1] = replace(seen.runs[-1], exit_code=None)
        array = seen.arrays["w5"]
        failed = Element("failed", "{'code': 'task_failed'}", ())
        seen.arrays["w5"] = replace(array, counts={"succeeded": 1, "failed": 1}, elements={**array.elements, 1: failed})
        seen.killed = [Killed(46.0, 77, run_id) for run_id in killed]
        assert [v.kind for v in judge(seen)] == kinds


def test_an_element_runs_after_that_of_its_index() -> None:
    for begin_s, kinds in ((44.7, []), (44.4, ["too-early"])):
        seen = _sound()
        _array(seen, (40.0, 45.0), (45.0, 50.0))
        seen.orders.append(
            Order("b", "key-b", 0, {"w6"}, after=("a", "succeeded"), array=Elements(1, 1), same_index=True)
        )
        seen.phases["w6"], seen.names["w6"] = "succeeded", "b"
        element = Element("succeeded", "", ((begin_s, 60.0),))
        seen.arrays["w6"] = Array(61.0, {"succeeded": 1}, {0: element})
        seen.runs.append(_run(1, begin_s, 59.0, workload="w6-0", slots=(5,), exit_code=0))
        assert [v.kind for v in judge(seen)] == kinds


def test_a_dependent_is_cancelled_only_if_the_other_did_not_succeed() -> None:
    seen = _sound()
    seen.orders.append(Order("d", "key-d", 0, {"w2"}, after=("w", "succeeded")))
    seen.phases["w2"], seen.names["w2"], seen.reasons["w2"] = "cancelled", "d", "{'code': 'dependency_never'}"
    assert {v.kind for v in judge(seen)} == {"wrong-end"}
    seen.phases["w1"], seen.orders[0].cancel_sent_s = "cancelled", 12.0
    seen.runs.pop()
    assert judge(seen) == []


def test_a_failure_needs_a_task_that_failed() -> None:
    seen = _sound()
    _false_failure(seen)
    assert {v.kind for v in judge(seen)} == {"wrong-end"}


def test_a_finished_gang_may_run_again_only_where_its_status_is_unknown() -> None:
    seen = _sound()
    _again(seen)
    seen.killed = [Killed(20.5, 77, "w1.1.count.0")]
    assert judge(seen) == []
    seen.killed = [Killed(24.0, 77, "w1.1.count.0")]
    assert [v.kind for v in judge(seen)] == ["finished-again"]


def test_a_finished_gang_may_run_again_if_the_owner_has_taken_its_machine() -> None:
    seen = _sound()
    _again(seen)
    seen.owned = [Owned("east/a/m-1", None, 21.0, 22.0, 24.0)]
    assert judge(seen) == []
    for owned in (Owned("east/a/m-1", None, 11.0, 12.0, 14.0), Owned("east/a/m-1", None, 38.0, 39.0, 44.0)):
        seen.owned = [owned]
        assert "finished-again" in [v.kind for v in judge(seen)]


def test_a_finished_gang_may_run_again_if_its_machine_is_lost_before_its_status_is_known() -> None:
    """It is known soon after the end, or after the end of an outage, unless a blackout begins before that.

    A loss by a blackout stands if an outage prevents until after the end that it is handled.
    """
    for outages, blackout_s, kinds in (
        ([], 21.0, []),
        ([], 23.0, ["finished-again"]),
        ([(15.0, 21.0)], 23.0, []),
        ([(21.0, 24.0), (26.0, 26.0)], 33.0, []),
        ([(21.0, 21.0)], 33.0, ["finished-again"]),
        ([(23.0, 24.0)], 26.0, ["finished-again"]),
        ([], 10.0, ["finished-again"]),
        ([(18.0, 21.0)], 10.0, []),
        ([(19.5, 21.0)], 10.0, ["finished-again"]),
    ):
        seen = _sound()
        _again(seen)
        seen.outages, seen.blackouts = list(outages), [(blackout_s, blackout_s + 9.0)]
        assert [v.kind for v in judge(seen)] == kinds


def test_a_gang_that_was_told_to_stop_as_it_finished_may_run_again() -> None:
    """A gang that received a stop before it exited with 0 may run again: trainers exit with 0 after a save too."""
    seen = _sound()
    _again(seen)
    seen.runs[0] = replace(seen.runs[0], told=True)
    assert judge(seen) == []


@pytest.mark.parametrize(
    "samples",
    [
        [_queue(7, "east"), _queue(9, "east")],
        [_queue(7, "east"), _queue(8), _queue(10, "east")],
        [_queue(7, "east"), _queue(8, "west"), _queue(10, "east")],
        [_queue(7, "east"), _queue(0, "east"), _queue(2, "east")],
    ],
    ids=[
        "two scans",
        "the region was used",
        "another region is idle",
        "the scheduler was started",
    ],
)
def test_a_workload_may_wait_for_the_pass_that_places_it(samples: list[QueueSample]) -> None:
    seen = _sound()
    seen.samples = samples
    assert judge(seen) == []


def test_a_journal_may_be_cut_off(tmp_path: Path) -> None:
    start = b'{"at_s": 1.0, "what": "start", "pid": 7, "machine": "m", "slots": [2], "tasks": 3, "run_id": "r"}\n'
    (tmp_path / "w1.4.count.2.7.99").write_bytes(start + b'{"at_s": 1.5, "what": "beat"}\n{"at_s": 1.6, "wha')
    (run,) = read_journals(tmp_path)
    assert (run.workload, run.attempt, run.job, run.task, run.slots, run.last_s) == ("w1", 4, "count", 2, (2,), 1.5)
    assert run.exit_code is None and run.loaded is None


def test_a_seed_draws_the_same_again_and_every_kind_of_fault() -> None:
    schedule = draw_schedule(5, 600.0, 7.0, 3.0)
    assert schedule == draw_schedule(5, 600.0, 7.0, 3.0) != draw_schedule(6, 600.0, 7.0, 3.0)
    assert {fault.kind for fault in schedule.faults} == set(FAULTS)
