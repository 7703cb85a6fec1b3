"""The scenario of `make demo-lending`, without pauses; `test_lending.py` covers its parts one by one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rigs.demos.lending.installation import installation
from rigs.demos.lending.outcome import checks
from rigs.demos.lending.picture import picture
from rigs.demos.lending.scenario import LendingCourse, LendingDemoScenario, Word
from rigs.demos.lending.steps import StepLine

OLD, NEW = "campus/physics/pc", "campus/chemistry/pc"


def _line(step: int, attempt: int, event: str = "step") -> StepLine:
    machine = OLD if attempt == 1 else NEW
    return StepLine(float(step + 10 * attempt), event, step, attempt, attempt, machine, 0, f"weights {step}")


def _course() -> LendingCourse:
    """Returns a run in which a training moves with a notice after its third step, and makes two more."""
    lines = [_line(step, 1) for step in (1, 2, 3)] + [_line(step, 2) for step in (4, 5)]
    word = Word(
        OLD, ("reclaim", "--notice", "20s"), 13.5, (0,), 20.0, 15.0, 14.0, (), True, {"gang": 1}, {"gang": 3},
        {"gang": (NEW, 4)},
    )  # fmt: skip
    expected = {"gang": [_line(step, 1) for step in range(1, 6)]}
    return LendingCourse(10.0, 30.0, [word], lines={"gang": [lines]}, expected=expected, exit_code=0)


def _failed(course: LendingCourse) -> set[str]:
    """Returns the names of the failed checks, without the one of `--gpus`, which this run does not contain."""
    return {one.name for one in checks(course) if not one.passed and "other three GPUs" not in one.name}


def _again(course: LendingCourse) -> None:
    course.lines["gang"][0].insert(3, replace(_line(3, 2), at_s=23.5))


def _left_out(course: LendingCourse) -> None:
    del course.lines["gang"][0][3]


def _other_weights(course: LendingCourse) -> None:
    course.lines["gang"][0][-1] = replace(course.lines["gang"][0][-1], digest="other")


def _still_there(course: LendingCourse) -> None:
    course.words[0].left = (4711,)


def _in_the_old_store(course: LendingCourse) -> None:
    course.words[0].strayed = 1


def _too_late(course: LendingCourse) -> None:
    course.words[0].gone_s = 34.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_again, "no step was lost"),
        (_left_out, "no step was lost"),
        (_other_weights, "the weights after every step"),
        (_still_there, "when the command said free"),
        (_in_the_old_store, "each attempt saved in the store"),
        (_too_late, "tasks had left within the notice"),
    ],
)
def test_the_checks_find_what_is_wrong(change: Callable[[LendingCourse], None], name: str) -> None:
    """Each check of the demo passes on a good run, and fails on one that is changed."""
    course = _course()
    assert _failed(course) == set()
    change(course)
    assert any(one.startswith(name) for one in _failed(course))


@pytest.mark.stack
@pytest.mark.timeout(600)
@pytest.mark.long
def test_trainings_lose_nothing_while_owners_take_their_machines(tmp_path: Path) -> None:
    """All checks of the demo pass, except those of times, and the picture can be drawn."""
    with installation(tmp_path) as site:
        course = LendingDemoScenario(site, 0.0, print).run()
    assert [f"{one.name}: {one.found}" for one in checks(course) if not one.passed and not one.timed] == []
    assert picture(course).startswith("<svg")
