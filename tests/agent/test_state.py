"""The state folder of an agent: keys, stopped attempts, and the unfinished attempts, which each start reads."""

import os
from pathlib import Path

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.old_attempts import tidy
from agent.state import AttemptFolder, StateFolder
from agent.tasks import RunFolder
from tests.agent.harness import ended, task_launch

_CONFIG = AgentConfig(
    machine="r/c/m", region="r", cluster="c", rack="a", cpus_milli=1000, memory_bytes=1, address="localhost",
    ports=(21000, 21001), state_dir=Path("state"), keep_runs_s=0.0,
)  # fmt: skip


def a_task(attempt: AttemptFolder, task: int = 0) -> RunFolder:
    """Creates the complete folder of a task."""
    run = attempt.run("main", task)
    run.work.mkdir(parents=True)
    run.report.parent.mkdir()
    return run


def keys(attempts: list[AttemptFolder]) -> list[str]:
    return [attempt.key for attempt in attempts]


def test_what_has_ended_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a start does not grow with the number of ended attempts whose folders are kept."""
    state = StateFolder(tmp_path)
    for number in range(1, 6):
        run = a_task(state.attempt("wl", number))
        tasks.start(run, task_launch(run, "true"))
        ended(run)
    running = a_task(state.attempt("wl", 6))
    tasks.start(running, task_launch(running, "sleep", "600"))
    assert keys(state.unfinished()) == ["wl.6"]
    looked: list[Path] = []
    real = tasks.inspect
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "inspect", lambda run: (looked.append(run.path), real(run))[1])
        assert keys(state.unfinished()) == ["wl.6"]
    assert looked == [running.path]
    tasks.request_stop(running, 0, told=True)
    ended(running)
    assert state.unfinished() == []


def test_a_start_under_way_at_a_stop_is_not_over(tmp_path: Path) -> None:
    """If an attempt is stopped while a task is starting, its port stays reserved until the task has ended."""
    state = StateFolder(tmp_path)
    attempt = state.attempt("wl", 1)
    run = a_task(attempt)
    assert keys(state.unfinished()) == ["wl.1"]
    state.stop_attempts("wl", 1)
    assert state.unfinished() == []
    tasks.start(run, task_launch(run, "sleep", "600"))
    assert keys(state.unfinished()) == ["wl.1"]
    assert tidy(state, _CONFIG) == []
    tasks.request_stop(run, 0, told=True)
    ended(run)
    assert state.unfinished() == []


def test_an_attempt_that_was_removed_is_not_remembered(tmp_path: Path) -> None:
    """The cached state of a removed attempt is dropped: a later folder of the same name is inspected again."""
    state = StateFolder(tmp_path)
    attempt = state.attempt("wl", 1)
    tasks.request_stop(a_task(attempt), 0, told=True)
    assert state.unfinished() == []
    state.remove(attempt)
    assert not attempt.path.exists()
    a_task(attempt)
    assert keys(state.unfinished()) == ["wl.1"]


def test_the_state_folder_remembers(tmp_path: Path) -> None:
    """The key, incarnation and stopped attempts outlive the agent; stop numbers never decrease; the key is private."""
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    assert first.private_key() == second.private_key()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert first.incarnation() == second.incarnation()
    first.stop_attempts("wl-1", 4)
    second.stop_attempts("wl-1", 2)
    assert (second.stopped_attempt("wl-1"), second.stopped_attempt("wl-2")) == (4, 0)
    (tmp_path / "incarnation").write_text('{"boot_id": "an earlier boot", "chance": "x"}')
    assert first.incarnation() not in ("an earlier boot.x", second.path)
    assert first.incarnation() == second.incarnation()
    for bad in ("../x", "", "a/b", "."):
        with pytest.raises(ValueError, match="workload id"):
            first.attempt(bad, 1)


def test_stops_are_forgotten_after_their_time(tmp_path: Path) -> None:
    """Old records of stopped attempts are removed, but recent ones, and those whose run folder exists, are kept."""
    state = StateFolder(tmp_path)
    for workload in ("old", "recent", "here", "reserved"):
        state.reserve_stop(workload)
    for workload in ("old", "recent", "here"):
        state.stop_attempts(workload, 3)
    state.attempt("here", 3).save_ports({})
    for name in ("old", "here", "reserved.reserve"):
        os.utime(tmp_path / "stopped" / name, (1000.0, 1000.0))
    state.forget_stopped(3600.0)
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == ["here", "recent"]
    assert (state.stopped_attempt("here"), state.stopped_attempt("old")) == (3, 0)
