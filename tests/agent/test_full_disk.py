"""A full disk below the agent's folder: no exit status is lost, tasks can be stopped, and failures blame nobody.

The folder is a small file system of its own. The tests check what tasks wrote outside of it.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import tasks
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, small_disk, until_async


class Disk:
    """A file system of 1 MiB that a test fills and empties."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Fills the file system completely."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            for size_bytes in (4096, 1):
                try:
                    while file.write(b"x" * size_bytes) == size_bytes:
                        pass
                except OSError:
                    continue

    def clear(self) -> None:
        """Frees the space again."""
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mounts a small file system."""
    with small_disk(tmp_path / "disk", "size=1m") as path:
        yield Disk(path)


WAIT = "while [ ! -e {folder}/go ]; do sleep 0.02; done; echo $RANK >> {folder}/done"


async def test_no_exit_status_is_lost(lab: Lab, tmp_path: Path, disk: Disk) -> None:
    """Tasks that end while the disk is full report their own exit codes, each once, as on a disk with free space."""
    config = lab.config(state_dir=disk.path / "state")
    wait = WAIT.format(folder=tmp_path)
    launch = description(lab.region, config, wait, wait, f"{wait}; exit 0", wait)
    lab.write(launch)
    runs = [lab.folder_of(launch, config, task=task) for task in range(4)]
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs))
        disk.fill()
        (tmp_path / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert sorted((e.task, e.exit_code, e.signal) for e in outcome.exits) == [(n, 0, None) for n in range(4)]
        assert not outcome.stopped
        disk.clear()
        await until_async(lambda: all(lab.log(launch, task=task)[1] for task in range(4)))
    assert sorted((tmp_path / "done").read_text().split()) == ["0", "1", "2", "3"]


async def test_tasks_are_stopped(lab: Lab, tmp_path: Path, disk: Disk) -> None:
    """A stop on a full disk ends the tasks after their grace period, and the attempt is rejected from then on."""
    config = lab.config(state_dir=disk.path / "state")
    launch = description(lab.region, config, f"trap 'echo saved > {tmp_path}/saved; exit 0' TERM; sleep 600 & wait")
    lab.write(launch)
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: tasks.inspect(lab.folder_of(launch, config)) is TaskState.RUNNING)
        await asyncio.sleep(0.3)
        disk.fill()
        stopped = await lab.stop(launch, config.machine, 20.0)
        assert (tmp_path / "saved").read_text() == "saved\n"
        assert [e.exit_code for e in stopped.exits] == [0] and stopped.stopped
        assert (await pending.result(NodeOutcome)).stopped
        assert StateFolder(config.state_dir).stopped_attempt(launch.workload_id) == 1
        disk.clear()


async def test_a_start_waits_for_room_and_blames_nobody(lab: Lab, tmp_path: Path, disk: Disk) -> None:
    """On a full disk no part of a gang starts; the gang starts when there is space, or fails without blame."""
    config = lab.config(state_dir=disk.path / "state")
    launch = description(lab.region, config, f"echo x >> {tmp_path}/starts")
    late = description(lab.region, config, f"echo x >> {tmp_path}/late")
    first = description(lab.region, config, "true")
    for each in (launch, late, first):
        lab.write(each)
    async with lab.agent(config):
        await lab.prepare(first, config.machine)  # Creates the files that the agent itself needs.
        disk.fill()
        failure = await (await lab.run(launch, config.machine)).failure()
        assert (failure.type, failure.non_retryable) == ("DiskFull", True)
        pending = await lab.run(late, config.machine, attempts=200)
        await asyncio.sleep(0.5)
        disk.clear()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0]
    assert (tmp_path / "late").read_text() == "x\n" and not (tmp_path / "starts").exists()
