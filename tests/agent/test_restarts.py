"""Restarts of a task alone: its shim starts the command again, without the setup, up to the limits by exit status."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.outcomes import outcome
from agent.restarts import Restarts
from agent.tasks import RunFolder, TaskState
from tests.agent.harness import ended, run_folder, task_launch, until

_FAIL_TWICE = "echo run >> order; test $(grep -c run order) -gt 2 || exit 3"


def _start(run: RunFolder, script: str, **more: Any) -> None:
    run.setup_script.write_text("echo setup >> order")
    setup = ("/bin/sh", "-e", str(run.setup_script))
    tasks.start(run, task_launch(run, "sh", "-c", script, setup=setup, **more))


def _order(run: RunFolder) -> list[str]:
    return (run.work / "order").read_text().split() if (run.work / "order").exists() else []


def test_a_task_is_started_again_until_it_succeeds(tmp_path: Path) -> None:
    """The setup is not repeated, the log says what happened, and the machine sees one task from start to end."""
    run = run_folder(tmp_path)
    _start(run, _FAIL_TWICE, restarts={"other": 5})
    started_at_s = run.started_at_s()
    end = ended(run)
    assert (end.exit_code, end.in_setup, end.restarts) == (0, False, 2)
    assert _order(run) == ["setup", "run", "run", "run"]
    assert run.started_at_s() == started_at_s
    assert run.output.read_text().splitlines() == [
        "mizzen: the task ended with exit code 3 and is started again: restart 1 of 5",
        "mizzen: the task ended with exit code 3 and is started again: restart 2 of 5",
    ]


@pytest.mark.parametrize(
    ("script", "limits", "expected"),
    [
        ("exit 3", {"other": 1}, (3, None, 1, 2)),
        ("exit 3", {"3": 0, "other": None}, (3, None, 0, 1)),
        ("kill -9 $$", {"137": 1, "other": 0}, (None, 9, 1, 2)),
        ("exit 137", {"137": 1}, (137, None, 1, 2)),
        ("exit 3", {}, (3, None, 0, 1)),
        ("exit 3", {"137": 2}, (3, None, 0, 1)),
    ],
)
def test_limits(
    tmp_path: Path, script: str, limits: dict[str, int | None], expected: tuple[int | None, int | None, int, int]
) -> None:
    """After the last restart, the task ends as its command did, and the outcome has the restarts that counted."""
    run = run_folder(tmp_path)
    _start(run, f"echo run >> order; {script}", restarts=limits)
    end = ended(run)
    assert (end.exit_code, end.signal, end.restarts, _order(run).count("run")) == expected
    (exit_,) = outcome("m", [run], None).exits
    assert exit_.restarts == end.restarts


def test_a_stop_ends_the_restarts(tmp_path: Path) -> None:
    """A task that fails after its notice, and one that is stopped in the pause before a restart, stay stopped."""
    first, second = run_folder(tmp_path, task=0), run_folder(tmp_path, task=1)
    _start(first, "trap 'exit 4' TERM; echo ready >> order; sleep 60 & wait", restarts={"other": None})
    until(lambda: "ready" in _order(first))
    tasks.request_stop(first, 30.0, told=True)
    assert (ended(first).exit_code, ended(first).restarts) == (4, 0)
    _start(second, "exit 3", restarts={"other": None})
    until(lambda: "started again" in second.output.read_text())
    tasks.request_stop(second, 30.0, told=True)
    assert ended(second).exit_code == 3


def test_the_agent_finds_the_new_process(tmp_path: Path) -> None:
    """The record of the task is that of the running process, so that it can be killed without its shim."""
    run = run_folder(tmp_path)
    _start(run, "echo run >> order; test $(grep -c run order) -gt 1 || exit 1; exec sleep 60", restarts={"other": 1})
    until(lambda: _order(run).count("run") == 2)
    identities = run.identities()
    assert identities is not None and identities[1].alive()
    os.kill(identities[0].pid, signal.SIGKILL)
    until(lambda: tasks.inspect(run) is TaskState.LOST)
    tasks.end_lost(run)
    assert not identities[1].alive()


def test_a_failed_setup_is_not_repeated(tmp_path: Path) -> None:
    """Restarts are for the command; the retries of the workload apply to the setup."""
    run = run_folder(tmp_path)
    run.setup_script.write_text("echo setup >> order; exit 3")
    setup = ("/bin/sh", "-e", str(run.setup_script))
    tasks.start(run, task_launch(run, "true", setup=setup, restarts={"other": 3}))
    assert (ended(run).in_setup, ended(run).restarts, _order(run)) == (True, 0, ["setup"])


def test_counts_by_status() -> None:
    """Statuses with a limit of their own do not count for the others."""
    restarts = Restarts({"1": 1, "other": 2})
    assert restarts.next(0) is None
    assert [restarts.next(code) is not None for code in (1, 2, -15, 1, 3)] == [True, True, True, False, False]
    assert (restarts.used(1), restarts.used(2), restarts.used(-9)) == (1, 2, 2)
