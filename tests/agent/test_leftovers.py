"""What tasks leave in their working directories: how long it is kept, and what is reported about it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.old_attempts import tidy
from agent.state import StateFolder
from domain.protocol.machines import NodeOutcome
from domain.task_reports import LeftFiles
from tests.agent.harness import Lab, description, ended, task_launch, until_async
from tests.small_disks import small_disk


@pytest.mark.parametrize(("keep_s", "kept_s"), [(None, 1.0), (3600.0, 3600.0), (99999.0, 7200.0)])
async def test_files_are_kept_and_reported(lab: Lab, keep_s: float | None, kept_s: float) -> None:
    """The outcome says where a task's files are and until when; `keep` is limited by the agent's setting."""
    config = lab.config(keep_runs_s=1.0, keep_at_most_s=7200.0, keep_free=0.0)
    writes = "head -c 2000000 /dev/zero > model.pt; mkdir -p out .cache; echo 1 > out/loss; cp model.pt .cache"
    launch = description(lab.region, config, writes, keep_s=keep_s, files={"big.txt": "x" * 100_000})
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        end = run.exit()
        if keep_s is None:
            await until_async(lambda: not run.path.exists())
    until_s = outcome.progress[0].left.until_s if outcome.progress[0].left is not None else 0.0
    assert outcome.progress[0].left == LeftFiles(config.machine, str(run.work), 2_000_002, until_s)
    assert end is None or until_s == end.ended_at_s + kept_s
    assert run.path.exists() is (keep_s is not None)


async def test_a_task_that_leaves_nothing_reports_nothing(lab: Lab) -> None:
    """Files of the document and hidden files are not reported."""
    config = lab.config()
    launch = description(lab.region, config, "echo 1 > .state", files={"train.py": "pass"})
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert outcome.progress[0].left is None


def _config(folder: Path, **more: Any) -> AgentConfig:
    return AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="a", cpus_milli=1000, memory_bytes=1 << 20, address="localhost",
        ports=(21000, 21001), state_dir=folder, **more,
    )  # fmt: skip


def _attempt(
    state: StateFolder, config: AgentConfig, workload_id: str, number: int, age_s: float, *, ends: bool
) -> None:
    """Runs an attempt that leaves a file of 2 MiB, and makes its folder `age_s` seconds older."""
    attempt = state.attempt(workload_id, number)
    launch = description("r", config, "true", workload_id=workload_id, attempt=number, keep_s=86400.0)
    attempt.save_launch(launch.model_dump_json().encode(), "file:///nowhere")
    run = attempt.run("main", 0)
    run.work.mkdir(parents=True)
    run.report.parent.mkdir()
    (run.work / "model.pt").write_bytes(b"x" * (2 << 20))
    tasks.start(run, task_launch(run, *(["true"] if ends else ["sleep", "600"])))
    if ends:
        ended(run)
    (run.path / "ship.json").write_text(json.dumps({"raw": 0, "offset": 0, "cut": 0, "done": True}))
    for path in (attempt.path, run.path):
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system of 12 MiB."""
    with small_disk(tmp_path / "disk", "size=12m") as path:
        yield path


def test_the_oldest_goes_first_if_the_disk_fills(disk: Path) -> None:
    """Kept folders are removed, oldest first, until enough is free; running tasks and young folders stay."""
    config = _config(disk, keep_runs_s=600.0, keep_free=0.45)
    state = StateFolder(disk)
    for age_s, name in ((7200, "wl-b"), (9000, "wl-a"), (3600, "wl-c"), (10, "wl-d"), (20_000, "wl-running")):
        _attempt(state, config, name, 1, age_s, ends=name != "wl-running")
    assert tidy(state, config) == ["wl-a.1", "wl-b.1"]
    assert tidy(state, config) == []
    assert tidy(state, config.model_copy(update={"keep_free": 1.0})) == ["wl-c.1"]
    tasks.request_stop(state.attempt("wl-running", 1).run("main", 0), 0.0, told=True)
    ended(state.attempt("wl-running", 1).run("main", 0))


def test_only_the_last_attempt_is_kept(tmp_path: Path) -> None:
    """The folder of an attempt that was followed by another one on the machine goes as without `keep`."""
    config = _config(tmp_path, keep_runs_s=600.0, keep_free=0.0)
    state = StateFolder(tmp_path)
    for number in (1, 2):
        _attempt(state, config, "wl", number, 3600, ends=True)
    assert tidy(state, config) == ["wl.1"]
    assert tidy(state, config.model_copy(update={"keep_at_most_s": 1800.0})) == ["wl.2"]


def test_the_owner_keeps_nothing(tmp_path: Path) -> None:
    """`keep` has no effect on a machine that its owner has taken back."""
    config = _config(tmp_path, keep_runs_s=600.0, keep_free=0.0)
    state = StateFolder(tmp_path)
    for age_s, name in ((3600, "wl-old"), (10, "wl-young")):
        _attempt(state, config, name, 1, age_s, ends=True)
    assert tidy(state, config) == []
    assert tidy(state, config, is_owners=True) == ["wl-old.1"]
