"""Recorded histories replay on the current workflows, so a deployment breaks no running workflow."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.client import WorkflowHistory
from temporalio.workflow import NondeterminismError

from domain.lifecycle.attempts import LATEST, TABLES, Step, StepOutcome, Table
from tests.workflows.changed import ImpatientWorkflow
from tests.workflows.replays import HISTORIES, WORKFLOWS, replay

FILES = sorted(HISTORIES.glob("*.json"))


def history(path: Path) -> WorkflowHistory:
    """Returns a recorded history."""
    return WorkflowHistory.from_json(path.stem, path.read_text())


def values(body: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields all strings of a JSON body with their keys; payloads are decoded."""
    if isinstance(body, dict):
        for name, value in body.items():
            yield from values(value, name)
    elif isinstance(body, list):
        for value in body:
            yield from values(value, key)
    elif isinstance(body, str):
        yield key, base64.b64decode(body).decode(errors="replace") if key == "data" else body


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
async def test_a_recorded_history_replays(path: Path) -> None:
    """A workflow with this history continues after a deployment."""
    await replay(history(path))


def test_every_workflow_has_a_recorded_history() -> None:
    """Every workflow type has a recorded history."""
    recorded = {
        history(path).events[0].workflow_execution_started_event_attributes.workflow_type.name for path in FILES
    }
    assert recorded == set(WORKFLOWS)


async def test_a_change_that_breaks_running_workflows_is_found() -> None:
    """A workflow with different first commands does not replay a recorded history."""
    (path,) = HISTORIES.glob("workload-succeeds.1.json")
    with pytest.raises(NondeterminismError):
        await replay(history(path), ImpatientWorkflow)


def edited(table: Table) -> Table:
    """Returns a changed table in which prepared tasks are stopped instead of run."""
    row = table[Step.PREPARE]
    return {**table, Step.PREPARE: replace(row, after={**row.after, StepOutcome.DONE: Step.WIND_UP})}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("workload")], ids=lambda p: p.stem)
async def test_a_new_table_of_steps_breaks_no_workflow_that_follows_an_older_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each workflow keeps the version of the step table with which it began, even if a newer one differs."""
    monkeypatch.setitem(cast(dict[int, Table], TABLES), LATEST + 1, edited(TABLES[LATEST]))
    await replay(history(path))


async def test_a_table_of_steps_that_is_edited_in_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change to a version of the step table that running workflows follow is detected."""
    monkeypatch.setitem(cast(dict[int, Table], TABLES), LATEST, edited(TABLES[LATEST]))
    (path,) = HISTORIES.glob("workload-succeeds.1.json")
    with pytest.raises(NondeterminismError):
        await replay(history(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_recorded_history_tells_nothing_of_where_it_was_recorded(path: Path, checkout: Path) -> None:
    """A recorded history contains no process, machine or folder of the computer on which it was recorded."""
    for key, text in values(json.loads(path.read_text())):
        assert key != "stackTrace"
        assert key != "identity" or text in ("agent", "client", "worker")
        for telling in (str(checkout), str(Path.home()), "site-packages", "@"):
            assert telling not in text, f"{key}: {text}"
