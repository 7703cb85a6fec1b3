"""Recorded histories replay on the workflows as they are: a deployment breaks none that runs."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.client import WorkflowHistory
from temporalio.workflow import NondeterminismError

from lifecycle.attempts import LATEST, TABLES, Event, Step, Table
from tests.workflows.changed import ImpatientWorkflow
from tests.workflows.replays import HISTORIES, WORKFLOWS, replay

FILES = sorted(HISTORIES.glob("*.json"))


def history(path: Path) -> WorkflowHistory:
    """A recorded history."""
    return WorkflowHistory.from_json(path.stem, path.read_text())


def values(body: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a JSON body with the keys under which they are; payloads decoded."""
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
    """A workflow that got this far before a deployment goes on after it."""
    await replay(history(path))


def test_every_workflow_has_a_recorded_history() -> None:
    """A workflow of which nothing is recorded would not be noticed when it breaks."""
    recorded = {
        history(path).events[0].workflow_execution_started_event_attributes.workflow_type.name for path in FILES
    }
    assert recorded == set(WORKFLOWS)


async def test_a_change_that_breaks_running_workflows_is_found() -> None:
    """A workflow that does something else first does not replay what was recorded."""
    (path,) = HISTORIES.glob("workload-succeeds.1.json")
    with pytest.raises(NondeterminismError):
        await replay(history(path), ImpatientWorkflow)


def edited(table: Table) -> Table:
    """Another table: what was prepared is stopped, and does not run."""
    row = table[Step.PREPARE]
    return {**table, Step.PREPARE: replace(row, after={**row.after, Event.DONE: Step.WIND_UP})}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("workload")], ids=lambda p: p.stem)
async def test_a_new_table_of_steps_breaks_no_workflow_that_follows_an_older_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each follows the version with which it began, however the newest one differs."""
    monkeypatch.setitem(cast(dict[int, Table], TABLES), LATEST + 1, edited(TABLES[LATEST]))
    await replay(history(path))


async def test_a_table_of_steps_that_is_edited_in_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that running workflows follow must stay as it is."""
    monkeypatch.setitem(cast(dict[int, Table], TABLES), LATEST, edited(TABLES[LATEST]))
    (path,) = HISTORIES.glob("workload-succeeds.1.json")
    with pytest.raises(NondeterminismError):
        await replay(history(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_recorded_history_tells_nothing_of_where_it_was_recorded(path: Path, checkout: Path) -> None:
    """No process, machine or folder of whoever recorded a history is in it."""
    for key, text in values(json.loads(path.read_text())):
        assert key != "stackTrace"
        assert key != "identity" or text in ("agent", "client", "worker")
        for telling in (str(checkout), str(Path.home()), "site-packages", "@"):
            assert telling not in text, f"{key}: {text}"
