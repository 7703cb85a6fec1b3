"""Records of an attempt that the disk has damaged: the agent starts, ends what it cannot go on with, and goes on."""

import asyncio
import logging
from pathlib import Path

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.tasks import RunFolder, TaskState
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, Pending, description, ended, run_folder, task_launch, until, until_async

_WAITS = "touch ready; while [ ! -e go ]; do sleep 0.05; done"


async def _started(lab: Lab, config: AgentConfig, launch: LaunchDescription) -> tuple[Pending, RunFolder]:
    lab.write(launch)
    pending, run = await lab.run(launch, config.machine), lab.folder_of(launch, config)
    await until_async(lambda: (run.work / "ready").exists())
    return pending, run


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, b'{"workload_id": "wl-other"}'])
async def test_a_damaged_launch_ends_its_attempt_alone(
    lab: Lab, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tasks are ended, its run fails with the damaged file in the message, and others are not affected."""
    config = lab.config()
    broken, sound, later = (description(lab.region, config, script) for script in (_WAITS, _WAITS, "true"))
    async with lab.agent(config):
        running, run = await _started(lab, config, broken)
        other, other_run = await _started(lab, config, sound)
    record = run.path.parent / "launch.json"
    record.write_bytes(damage)
    with caplog.at_level(logging.ERROR):
        async with lab.agent(config):
            await until_async(lambda: tasks.inspect(run) is TaskState.ENDED)
            failure = await running.failure()
            assert (failure.type, failure.non_retryable) == ("MachineFault", True)
            assert str(record) in str(failure)
            assert (await lab.stop(broken, config.machine, 0.0)).stopped
            lab.write(later)
            outcome: NodeOutcome = await (await lab.run(later, config.machine)).result(NodeOutcome)
            assert [end.exit_code for end in outcome.exits] == [0]
            (other_run.work / "go").touch()
            outcome = await other.result(NodeOutcome)
            assert [end.exit_code for end in outcome.exits] == [0]
    assert f"attempt {broken.workload_id}.1 is ended: the record {record} is damaged" in caplog.text


async def test_no_damaged_record_keeps_the_agent_from_its_work(lab: Lab) -> None:
    """All other records are damaged at once: the task goes on to its end, and others start."""
    config = lab.config()
    launch, later = description(lab.region, config, _WAITS), description(lab.region, config, "true")
    async with lab.agent(config):
        running, run = await _started(lab, config, launch)
    records = [run.path / "pid.json", run.path / "disk.json", run.path / "serving.json"]
    records += [run.path.parent / name for name in ("disk.json", "ports.json")]
    records += [config.state_dir / name for name in ("agent.json", "incarnation", f"stopped/{launch.workload_id}")]
    for path in records:
        path.write_bytes(b"\0")
    async with lab.agent(config):
        lab.write(later)
        outcome: NodeOutcome = await (await lab.run(later, config.machine)).result(NodeOutcome)
        assert [end.exit_code for end in outcome.exits] == [0]
        assert tasks.inspect(run) is TaskState.RUNNING
        (run.work / "go").touch()
        outcome = await asyncio.wait_for(running.result(NodeOutcome), 60)
        assert [end.exit_code for end in outcome.exits] == [0]


def test_a_task_without_its_record_can_be_stopped(tmp_path: Path) -> None:
    """Its shim is found by its lock. Without a shim the task is lost, and its processes are killed."""
    run, lost = run_folder(tmp_path, task=0), run_folder(tmp_path, task=1)
    for one in (run, lost):
        tasks.start(one, task_launch(one, "sh", "-c", "trap 'exit 4' TERM; touch ready; sleep 60 & wait"))
        until(lambda one=one: (one.work / "ready").exists())
    known = lost.identities()
    for one in (run, lost):
        (one.path / "pid.json").write_bytes(b"{")
    tasks.request_stop(run, 30.0, told=True)
    assert (ended(run).exit_code, ended(run).noticed) == (4, True)
    assert known is not None
    known[0].send(9)
    until(lambda: tasks.inspect(lost) is TaskState.LOST)
    tasks.end_lost(lost)
    assert not known[1].alive()
    assert (ended(lost).exit_code, ended(lost).signal) == (None, None)


def test_damaged_ends_and_stops(tmp_path: Path) -> None:
    """The end is not known, and the time of the stop is up, so that the task is killed."""
    run = run_folder(tmp_path)
    tasks.start(run, task_launch(run, "sh", "-c", "trap '' TERM; touch ready; sleep 60"))
    until(lambda: (run.work / "ready").exists())
    (run.path / "stop.json").write_bytes(b"")
    assert tasks.overdue(run)
    tasks.force(run)
    (run.path / "exit.json").write_bytes(b"")
    assert (tasks.inspect(run), ended(run).exit_code, ended(run).signal) == (TaskState.ENDED, None, None)
    assert ended(run).ended_at_s == (run.path / "exit.json").stat().st_mtime
