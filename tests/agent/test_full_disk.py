"""A full disk below the agent's folder: no exit status is lost, tasks can be stopped, and failures blame nobody.

The folder is a small file system of its own. The tests check what tasks wrote outside of it.
"""

import asyncio
from pathlib import Path

import pytest

from agent import tasks
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.protocol.leases import ElementsRun
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, run_elements, runner, until_async
from tests.small_disks import SmallDisk

WAIT = "while [ ! -e {folder}/go ]; do sleep 0.02; done; echo $RANK >> {folder}/done"


async def test_no_exit_status_is_lost(lab: Lab, tmp_path: Path, small: SmallDisk) -> None:
    """Tasks that end while the disk is full report their own exit codes, each once, as on a disk with free space."""
    config = lab.config(state_dir=small.path / "state")
    wait = WAIT.format(folder=tmp_path)
    launch = description(lab.region, config, wait, wait, f"{wait}; exit 0", wait)
    lab.write(launch)
    runs = [lab.folder_of(launch, config, task=task) for task in range(4)]
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs))
        small.fill()
        (tmp_path / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert sorted((e.task, e.exit_code, e.signal) for e in outcome.exits) == [(n, 0, None) for n in range(4)]
        assert not outcome.stopped
        small.clear()
        await until_async(lambda: all(lab.log(launch, task=task)[1] for task in range(4)))
    assert sorted((tmp_path / "done").read_text().split()) == ["0", "1", "2", "3"]


async def test_tasks_are_stopped(lab: Lab, tmp_path: Path, small: SmallDisk) -> None:
    """A stop on a full disk ends the tasks after their grace period, and the attempt is rejected from then on."""
    config = lab.config(state_dir=small.path / "state")
    launch = description(lab.region, config, f"trap 'echo saved > {tmp_path}/saved; exit 0' TERM; sleep 600 & wait")
    lab.write(launch)
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: tasks.inspect(lab.folder_of(launch, config)) is TaskState.RUNNING)
        await asyncio.sleep(0.3)
        small.fill()
        stopped = await lab.stop(launch, config.machine, 20.0)
        assert (tmp_path / "saved").read_text() == "saved\n"
        assert [e.exit_code for e in stopped.exits] == [0] and stopped.stopped
        assert (await pending.result(NodeOutcome)).stopped
        assert StateFolder(config.state_dir).stopped_attempt(launch.workload_id) == 1
        small.clear()


_SLOW = """
trap 'exit 0' TERM
touch FOLDER/begun.$MIZZEN_ARRAY_INDEX
while [ ! -e FOLDER/go ]; do sleep 0.02; done
echo $MIZZEN_ARRAY_INDEX >> FOLDER/done
"""


async def test_a_lane_waits_for_room(lab: Lab, tmp_path: Path, small: SmallDisk) -> None:
    """A runner goes on after the disk was full, also while an element ran for long; each element runs once.

    The next agent can read what the lane has written.
    """
    config = lab.config(state_dir=small.path / "state")
    launch = runner(lab, config, _SLOW.replace("FOLDER", str(tmp_path)))
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        chunk = await run_elements(lab, launch, config, 0, 1)
        await until_async(lambda: (tmp_path / "begun.0").exists())
        small.fill()
        await asyncio.sleep(2.0)  # After a second, the lane notes that the output can be shipped.
    async with lab.agent(config):
        (tmp_path / "go").touch()
        await until_async(lambda: (tmp_path / "done").exists())
        await asyncio.sleep(1.0)
        small.clear()
        run: ElementsRun = await chunk.result(ElementsRun)
        assert [(one.index, one.exit_code) for one in run.results] == [(0, 0), (1, 0)]
        await (await run_elements(lab, launch, config)).result(ElementsRun)
        assert (await running.result(NodeOutcome)).exits[0].succeeded
    assert (tmp_path / "done").read_text() == "0\n1\n"


async def test_a_lane_is_stopped(lab: Lab, tmp_path: Path, small: SmallDisk) -> None:
    """A stop on a full disk ends a runner in time. The end of its element may be unknown; no other one is started."""
    config = lab.config(state_dir=small.path / "state")
    launch = runner(lab, config, _SLOW.replace("FOLDER", str(tmp_path)), interrupt="now")
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        chunk = await run_elements(lab, launch, config, 0, 1)
        await until_async(lambda: (tmp_path / "begun.0").exists())
        small.fill()
        stopped = await lab.stop(launch, config.machine, grace_s=2.0)
        assert {one.index: one.began_s is not None for one in stopped.elements} == {0: True, 1: False}
        small.clear()
        assert (await chunk.result(ElementsRun)).is_over
        assert (await running.result(NodeOutcome)).stopped
    assert not (tmp_path / "begun.1").exists()


@pytest.mark.rotating
async def test_a_start_waits_for_room_and_blames_nobody(lab: Lab, tmp_path: Path, small: SmallDisk) -> None:
    """On a full disk no part of a gang starts; the gang starts when there is space, or fails without blame."""
    config = lab.config(state_dir=small.path / "state")
    launch = description(lab.region, config, f"echo x >> {tmp_path}/starts")
    late = description(lab.region, config, f"echo x >> {tmp_path}/late")
    first = description(lab.region, config, "true")
    for each in (launch, late, first):
        lab.write(each)
    async with lab.agent(config):
        await lab.prepare(first, config.machine)  # Creates the files that the agent itself needs.
        small.fill()
        failure = await (await lab.run(launch, config.machine)).failure()
        assert (failure.type, failure.non_retryable) == ("DiskFull", True)
        pending = await lab.run(late, config.machine, attempts=200)
        await asyncio.sleep(0.5)
        small.clear()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0]
    assert (tmp_path / "late").read_text() == "x\n" and not (tmp_path / "starts").exists()
