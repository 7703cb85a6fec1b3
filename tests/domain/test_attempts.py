"""The step table of attempts: its invariants in every version, the phases that follow, and its documentation."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from domain.lifecycle.attempts import (
    END_PHASES,
    FIRST,
    LATEST,
    NEXT_PHASES,
    TABLES,
    AttemptFields,
    End,
    Step,
    StepOutcome,
    Table,
    next_phases,
    of_all_versions,
)
from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from tests.domain.pages import endings, picture, steps

TABLE = TABLES[LATEST]


def ways(table: Table, step: Step, taken: tuple[Step, ...] = ()) -> list[tuple[tuple[Step, ...], End]]:
    """Returns every path from `step` to an end, with its steps."""
    assert step not in taken, f"cycle: {taken}"
    out = []
    for target in table[step].after.values():
        here = (*taken, step)
        out += [(here, target)] if isinstance(target, End) else ways(table, target, here)
    return out


@pytest.mark.parametrize("version", TABLES)
def test_every_way_ends(version: int) -> None:
    """No path takes a step twice, and every step and end is on a path."""
    table = TABLES[version]
    found = ways(table, FIRST)
    assert {step for taken, _ in found for step in taken} == set(table)
    assert {end for _, end in found} == set(END_PHASES)


@pytest.mark.parametrize("version", TABLES)
def test_phases_go_forward(version: int) -> None:
    """On every path phases change only as `NEXT_PHASES` allows, in every version."""
    table = TABLES[version]
    for taken, end in ways(table, FIRST):
        shown = [table[step].phase for step in taken if table[step].phase is not None]
        for phase, following in pairwise(dict.fromkeys(shown)):
            assert phase is not None and following in NEXT_PHASES[phase]
        last = shown[-1]
        assert last is not None and END_PHASES[end] <= NEXT_PHASES[last]


def test_which_phase_may_follow_which() -> None:
    """All legal phase changes are listed: queued workloads are awarded, and placed ones may always end."""
    ends = {Phase.PENDING, Phase.PREEMPTED, Phase.SUCCEEDED, Phase.CANCELLED, Phase.FAILED}
    assert {
        Phase.PENDING: {Phase.PLACING, Phase.FAILED, Phase.CANCELLED},
        Phase.PREEMPTED: {Phase.PLACING, Phase.FAILED, Phase.CANCELLED, Phase.SUCCEEDED},
        Phase.PLACING: {Phase.MIGRATING, Phase.PROVISIONING, *ends},
        Phase.MIGRATING: {Phase.PROVISIONING, *ends},
        Phase.PROVISIONING: {Phase.RUNNING, *ends},
        Phase.RUNNING: {Phase.CHECKPOINTING, *ends},
        Phase.CHECKPOINTING: ends,
        **{phase: set() for phase in TERMINAL_PHASES},
    } == NEXT_PHASES


def test_phases_follow_from_the_table_alone() -> None:
    """Changing `may_pass` or the phase of a row changes the legal phase changes."""
    edited: dict[Step, AttemptFields] = {
        **TABLE,
        Step.COPY: replace(TABLE[Step.COPY], may_pass=False),
        Step.WITHDRAW: replace(TABLE[Step.WITHDRAW], phase=Phase.CHECKPOINTING),
    }
    following = next_phases(edited)
    assert following[Phase.PLACING] == NEXT_PHASES[Phase.PLACING] - {Phase.PROVISIONING}
    assert following[Phase.PROVISIONING] == NEXT_PHASES[Phase.PROVISIONING] | {Phase.CHECKPOINTING}


def test_a_newer_table_takes_no_way_from_workflows_that_follow_an_older_one() -> None:
    """A new version with another phase in a step adds phase changes; those of the older version stay legal."""
    newer: dict[Step, AttemptFields] = {**TABLE, Step.PREPARE: replace(TABLE[Step.PREPARE], phase=Phase.PLACING)}
    assert Phase.PROVISIONING not in next_phases(newer)[Phase.PLACING]
    both = of_all_versions([TABLE, newer])
    for table in (TABLE, newer):
        assert all(allowed <= both[phase] for phase, allowed in next_phases(table).items())


def test_phases_are_sorted_into_three_kinds() -> None:
    """Every phase is a queued, a placed or a terminal one, and the steps have exactly the placed ones."""
    kinds: tuple[Mapping[Phase, object] | frozenset[Phase], ...] = (QUEUED_PHASES, PLACED_PHASES, TERMINAL_PHASES)
    assert sorted(phase for kind in kinds for phase in kind) == sorted(Phase)
    assert {row.phase for row in TABLE.values()} - {None} == PLACED_PHASES


def test_the_documentation_is_made_from_the_tables(checkout: Path) -> None:
    """`docs/lifecycle.md` contains the diagram and both tables as generated from the code."""
    page = (checkout / "docs" / "lifecycle.md").read_text()
    for part in (picture(NEXT_PHASES), steps(TABLE), endings()):
        assert part in page, f"docs/lifecycle.md should have:\n{part}"


def test_phases_in_sql_are_those_of_the_tables(checkout: Path) -> None:
    """SQL functions list the queued and the final phases completely, use the first phase of an attempt, and ask whether
    one runs.
    """
    lists, single = [], []
    for path in sorted((checkout / "infra" / "db" / "functions").glob("*.sql")):
        text = path.read_text()
        lists += [set(re.findall(r"'(\w+)'", found)) for found in re.findall(r"phase in \(([^)]*)\)", text)]
        single += re.findall(r"phase = '(\w+)'", text)
    known = [set(QUEUED_PHASES), set(TERMINAL_PHASES), {Phase.RUNNING, Phase.SUCCEEDED}]
    assert all(found in known for found in lists) and all(one in lists for one in known)
    assert {*single} == {TABLE[FIRST].phase, Phase.RUNNING}


def test_events_have_rows() -> None:
    """Every event occurs in a row of the table."""
    assert {event for row in TABLE.values() for event in row.after} == set(StepOutcome)
