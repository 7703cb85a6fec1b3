"""The step table of instances: every path ends, and the legal phase changes."""

from pathlib import Path

import pytest

from domain.lifecycle.instances import (
    FIRST_STEPS,
    INSTANCE_TABLES,
    LATEST_INSTANCES,
    NEXT_INSTANCE_PHASES,
    InstanceEvent,
    InstancePhase,
    InstanceStep,
    InstanceTable,
    next_instance_phases,
)
from tests.domain.pages import instance_picture, instance_steps


def ways(table: InstanceTable, step: InstanceStep | None, taken: tuple[InstanceStep, ...] = ()) -> set[InstanceStep]:
    """Returns the steps on all paths from `step` to the end; no path takes a step twice."""
    if step is None:
        return set(taken)
    assert step not in taken, f"cycle: {taken}"
    return set().union(*(ways(table, target, (*taken, step)) for target in table[step].after.values()))


@pytest.mark.parametrize("version", INSTANCE_TABLES)
def test_every_way_ends(version: int) -> None:
    """No path takes a step twice, and every step is on a path; a replacement can begin in any phase but the last."""
    table = INSTANCE_TABLES[version]
    assert ways(table, InstanceStep.LAUNCH) == set(table) == set(InstanceStep)
    assert set(FIRST_STEPS) == set(InstancePhase) - {InstancePhase.GONE}
    for phase, step in FIRST_STEPS.items():
        assert phase in (InstancePhase.REQUESTED, table[step].phase)


@pytest.mark.parametrize("version", INSTANCE_TABLES)
def test_an_older_version_goes_no_other_ways(version: int) -> None:
    """Phase changes of older versions are legal in the newest version, against which the ledger checks."""
    for phase, following in next_instance_phases(INSTANCE_TABLES[version]).items():
        assert following <= NEXT_INSTANCE_PHASES[phase]


def test_which_phase_may_follow_which() -> None:
    """All legal phase changes are listed: a machine that may exist is drained first, and a launch may fail."""
    phase = InstancePhase
    assert {
        phase.REQUESTED: {phase.LAUNCHING},
        phase.LAUNCHING: {phase.JOINING, phase.DRAINING, phase.GONE},
        phase.JOINING: {phase.READY, phase.DRAINING},
        phase.READY: {phase.DRAINING},
        phase.DRAINING: {phase.GONE},
        phase.GONE: set(),
    } == NEXT_INSTANCE_PHASES


def test_the_page_shows_the_newest_table(checkout: Path) -> None:
    """`docs/lifecycle.md` contains the diagram and the table as generated from the code."""
    page = (checkout / "docs" / "lifecycle.md").read_text()
    for part in (instance_picture(NEXT_INSTANCE_PHASES), instance_steps(INSTANCE_TABLES[LATEST_INSTANCES])):
        assert part in page, f"docs/lifecycle.md should have:\n{part}"


def test_only_a_refusal_skips_the_end_of_the_machine() -> None:
    """Every path ends with the provider's termination, except after a refused launch."""
    table = INSTANCE_TABLES[LATEST_INSTANCES]
    last = {(step, event) for step, row in table.items() for event, target in row.after.items() if target is None}
    assert last == {
        (InstanceStep.LAUNCH, InstanceEvent.REFUSED),
        (InstanceStep.TERMINATE, InstanceEvent.DONE),
    }
