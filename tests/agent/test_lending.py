"""The owner of a machine takes it back and lends it again: real agent, real tasks, real socket."""

import asyncio
import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.host import serve
from agent.lending.lender import Lender
from agent.lending.owner_record import LendingFile, OwnerRecord
from agent.lending.owner_request import FileWithoutAgent, OwnersWord
from agent.lending.owner_socket import open_socket, serve_owner, socket_path
from agent.locks import StartLocks
from agent.notices import MachineNotices
from agent.shim import boot_time_s
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.ids import machine_workflow_id
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, Pace, RunPace
from infra.config.services import TemporalSettings
from infra.temporal_client import connect
from tests.agent.harness import Lab, description, until_async

OWNER = str(os.getuid())


STUBBORN = "trap '' TERM; while :; do sleep 0.05; done"


_SDK = Path(__file__).resolve().parent.parent.parent / "sdk"


_COMMAND = Path(sys.executable).parent / "mizzen"


def _lent(config: AgentConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the owner's command line."""
    command = [str(_COMMAND), *arguments, "--socket", str(config.state_dir / "owner.sock")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _as_nobody(config: AgentConfig) -> str:
    """Returns the agent's answer to another user, whom the mode of the socket does not keep away."""
    (config.state_dir / "owner.sock").chmod(0o666)
    code = (
        f"import os, socket; os.chdir({str(config.state_dir)!r}); os.setuid(65534)\n"
        "asking = socket.socket(socket.AF_UNIX); asking.connect('owner.sock'); print(asking.recv(999).decode())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


async def _mizzen(config: AgentConfig, *arguments: str) -> dict[str, Any]:
    """Runs the owner's command line, and returns the status that it prints."""
    done = await asyncio.to_thread(_lent, config, *arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return status


async def test_the_owner_takes_the_machine_at_once(lab: Lab) -> None:
    """Tasks are killed, new ones are refused, also after a restart of the agent, until the owner lends again."""
    config = lab.config(gpus=2, gpu_type="g", owner=OWNER)
    launch = description(lab.region, config, STUBBORN, "sleep 600")
    lab.write(launch)
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        runs = [lab.folder_of(launch, config, task=task) for task in range(2)]
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs))
        shown = await _mizzen(config, "lending")
        assert [(one["name"], one["tenant"], one["gpus"]) for one in shown["running"]] == [("trial", "vision", [0, 1])]
        status = await _mizzen(config, "reclaim", "--now")
        assert (status["free"], status["lent"], status["running"]) == (True, False, [])
        assert all(tasks.inspect(run) is TaskState.ENDED for run in runs)
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert outcome.notice is not None and outcome.notice.platform == "owner" and not outcome.stopped
        workflow = lab.client.get_workflow_handle(machine_workflow_id(config.machine))
        notices = await workflow.query("notices", result_type=list[dict[str, Any]])
        assert [one["notice"]["platform"] for one in notices] == ["owner"]
    other = description(lab.region, config, "exit 0")
    lab.write(other)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, lambda: connect(lab.temporal), stop))
    await until_async((config.state_dir / "owner.sock").exists)
    refused = await lab.run(other, config.machine)
    await asyncio.sleep(1.0)
    assert not lab.folder_of(other, config).path.exists()
    assert (await _mizzen(config, "lend"))["lent"]
    again: NodeOutcome = await refused.result(NodeOutcome)
    assert [end.exit_code for end in again.exits] == [0]
    stop.set()
    await serving


@pytest.mark.rotating
async def test_a_notice_lets_tasks_save(lab: Lab) -> None:
    """Tasks get SIGTERM at once; one that saves within the notice ends by itself, one that does not is killed then."""
    config = lab.config(gpus=2, gpu_type="g", owner=OWNER)
    saving = "trap 'echo saved > saved; cat $MIZZEN_DEADLINE_FILE > told; exit 0' TERM; while :; do sleep 0.05; done"
    launch = description(lab.region, config, saving, STUBBORN, grace_s=60.0)
    lab.write(launch)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        runs = [lab.folder_of(launch, config, task=task) for task in range(2)]
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs))
        await asyncio.sleep(0.3)
        status = await _mizzen(config, "reclaim", "--notice", "4s")
    assert status["free"]
    assert (runs[0].work / "saved").read_text() == "saved\n"
    # The task was told the end of the notice, which has passed, although the workload's grace is a minute.
    assert json.loads((runs[0].work / "told").read_text())["deadline_boot_s"] <= boot_time_s() < 2**40
    assert runs[1].exit() is not None and runs[1].exit().signal == 9  # type: ignore[union-attr]


async def test_single_gpus_are_taken(lab: Lab) -> None:
    """Only the tasks on these GPUs end, and only tasks on these GPUs are refused. The machine is registered anew."""
    config = lab.config(gpus=4, gpu_type="g", owner=OWNER)
    first = description(lab.region, config, "sleep 600")
    other = description(lab.region, config, "sleep 600")
    other = other.model_copy(update={"tasks": (other.tasks[0].model_copy(update={"slots": (2,)}),)})
    for launch in (first, other):
        lab.write(launch)
    async with lab.agent(config):
        gone, stays = await lab.run(first, config.machine), await lab.run(other, config.machine)
        runs = [lab.folder_of(launch, config) for launch in (first, other)]
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs))
        status = await _mizzen(config, "reclaim", "--now", "--gpus", "0,1")
        assert [tasks.inspect(run) for run in runs] == [TaskState.ENDED, TaskState.RUNNING]
        assert (status["lent"], sorted(status["gpus_at_s"])) == (True, ["0", "1"])
        outcome: NodeOutcome = await gone.result(NodeOutcome)
        assert outcome.notice is not None and outcome.notice.platform == "owner"
        workflow = lab.client.get_workflow_handle(machine_workflow_id(config.machine))
        hellos = await workflow.query("hellos", result_type=list[dict[str, Any]])
        assert hellos[-1]["withheld"] == 0b11 and not hellos[-1]["taken"]
        again = description(lab.region, config, "exit 0")
        lab.write(again)
        refused = await (await lab.run(again, config.machine, attempts=1)).failure()
        assert "has taken GPUs of the machine back" in str(refused)
        await _mizzen(config, "lend", "--gpus", "0")
        assert LendingFile(config.state_dir).read().withheld == 0b10
        await lab.stop(other, config.machine, 0.0)
        await stays.result(NodeOutcome)


async def test_the_owner_needs_nothing_else(lab: Lab) -> None:
    """Without a Temporal server, tasks that run are killed at the owner's word."""
    config = lab.config(gpus=1, gpu_type="g", owner=OWNER)
    launch = description(lab.region, config, "sleep 600")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: tasks.inspect(run) is TaskState.RUNNING)
    nowhere = TemporalSettings(address="127.0.0.1:1")
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, lambda: connect(nowhere), stop))
    await until_async((config.state_dir / "owner.sock").exists)
    assert (await _mizzen(config, "reclaim", "--now"))["free"]
    assert tasks.inspect(run) is TaskState.ENDED
    stop.set()
    await serving


async def test_only_the_owner_is_heard(lab: Lab) -> None:
    """Wrong requests are refused by name; a socket of another owner is refused by the agent."""
    config = lab.config(gpus=2, gpu_type="g", owner=OWNER)
    async with lab.agent(config):
        await until_async((config.state_dir / "owner.sock").exists)
        assert (config.state_dir / "owner.sock").stat().st_mode & 0o777 == 0o600
        wrong = [
            (["reclaim", "--now", "--gpus", "2"], "gpus: 2: the machine has GPUs 0 to 1"),
            (["reclaim"], "'--now' or '--notice DURATION': give one of them"),
            (["lend", "--hours", "8-9"], "hours: '8-9': must be like '20:00-08:00 mon-fri'"),
            (["lend", "--hours", "08:00-09:00 xyz"], "'xyz' is not a day"),
            (["reclaim", "--now", "--gpus", "x"], "'x' must be GPU numbers"),
            (["reclaim", "--notice", "3d"], "notice: 259200 s: must be from 0 to 86400 s (one day)"),
        ]
        for arguments, message in wrong:
            done = await asyncio.to_thread(_lent, config, *arguments)
            assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert (await _mizzen(config, "lending"))["lent"]
        if os.getuid() == 0:
            assert (
                await asyncio.to_thread(_as_nobody, config)
                == '{"error": "user 65534 is not the owner of this machine"}'
            )
    done = await asyncio.to_thread(_lent, config, "lending")
    assert (done.returncode, "does not exist" in done.stderr) == (3, True)


async def test_an_agent_leaves_the_socket_of_the_next_one(lab: Lab) -> None:
    """An agent that ends late removes only its own socket, also if the next agent has the same path."""
    config = lab.config(owner=OWNER)
    state = StateFolder(config.state_dir)
    lender = Lender(config, state, MachineNotices(None), StartLocks())
    serving = []
    for _ in range(2):
        listening = open_socket(config)
        assert listening is not None
        serving.append(asyncio.create_task(serve_owner(config, listening, lender)))
        await until_async(lambda: _lent(config, "lending").returncode == 0)
    for ends, is_there in zip(serving, (True, False), strict=True):
        ends.cancel()
        await asyncio.wait({ends})
        assert socket_path(config).exists() is is_there
        if is_there:
            assert (await _mizzen(config, "lending"))["machine"] == config.machine


async def test_tasks_learn_how_often_to_save(lab: Lab) -> None:
    """The interval that the control plane sends is in the file that the task's environment names, and in effect."""
    config = lab.config()
    code = (
        "import os, time; from mizzen.cadence.interval_file import IntervalFile\n"
        "file = IntervalFile.from_environ(os.environ, time.monotonic)\n"
        "while file.current() is None: time.sleep(0.05)\n"
        "print(file.current())"
    )
    launch = description(lab.region, config, f'PYTHONPATH={_SDK} exec {sys.executable} -c "{code}"')
    lab.write(launch)
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: tasks.inspect(lab.folder_of(launch, config)) is TaskState.RUNNING)
        run = RunPace(f"{launch.workload_id}.1", 412.5, 0.8, 30.0, 11.25, "optimum")
        other = RunPace("wl-elsewhere.1", 1.0, 0.8, 30.0, 11.25)
        await (await lab.start(Activity.PACE_NODE, config.machine, Pace(config.machine, 1e10, [other, run]))).result(
            object
        )
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert [end.exit_code for end in outcome.exits] == [0]
        await until_async(lambda: lab.log(launch)[1])
    assert b"interval_s=412.5, expires_at_s=10000000000.0, hazard_per_h=0.8, period_s=30.0" in lab.log(launch)[0]


async def test_hours_take_the_machine_and_lend_it_again(lab: Lab) -> None:
    """Outside its hours the machine is the owner's. The owner's own reclaim is not ended by the hours."""
    config = lab.config(gpus=1, gpu_type="g", owner=OWNER)
    now = datetime.now().astimezone()
    closed = f"{(now.hour + 2) % 24:02}:00-{(now.hour + 3) % 24 or 24:02}:00"
    async with lab.agent(config):
        await until_async((config.state_dir / "owner.sock").exists)
        status = await _mizzen(config, "lend", "--hours", closed)
        assert (status["lent"], status["by_hours"], status["opens_at_s"] > now.timestamp()) == (False, True, True)
        shown = await asyncio.to_thread(_lent, config, "lending")
        assert f"is yours, and free, until its hours begin, {now + timedelta(hours=2):%a %H}:00" in shown.stdout
        status = await _mizzen(config, "lend", "--hours", "always")
        assert (status["lent"], status["hours"]) == (True, None)


async def test_tasks_get_notice_before_the_hours_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five minutes before a window ends the machine is announced to be the owner's; the next window lends it again.

    What the owner takes stays the owner's, whatever the hours.
    """
    monkeypatch.setattr("agent.lending.lender._TICK_S", 0.02)
    now = [datetime(2026, 3, 3, 7, 54).astimezone()]
    config = AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="k", cpus_milli=1000, memory_bytes=1 << 30, address="a",
        ports=(21000, 21099), state_dir=tmp_path / "state", gpus=2, gpu_type="g",
    )  # fmt: skip
    notices = MachineNotices(None, {})
    lender = Lender(config, StateFolder(config.state_dir), notices, StartLocks(), clock=lambda: now[0].timestamp())
    await lender.lend(None, "20:00-08:00 mon-fri")
    running = asyncio.create_task(lender.run())
    await asyncio.sleep(0.1)
    assert not lender.refuses() and notices.current is None
    now[0] = now[0].replace(hour=7, minute=56)
    await until_async(lambda: notices.current is not None)
    assert lender.refuses() and notices.current is not None
    assert notices.current.ends_at_s == now[0].replace(hour=8, minute=0).timestamp()
    now[0] = now[0].replace(hour=12)
    assert lender.status()["opens_at_s"] == now[0].replace(hour=20, minute=0).timestamp()
    now[0] = now[0].replace(hour=20, minute=1)
    await until_async(lambda: notices.current is None)
    assert not lender.refuses()
    await lender.reclaim(frozenset({1}), 0.0)
    now[0] = now[0].replace(day=4, hour=12)
    await until_async(lambda: lender.refuses())
    now[0] = now[0].replace(hour=20)
    await until_async(lambda: not lender.refuses())
    assert lender.refuses([1]), "the hours do not lend what the owner has taken"
    await lender.reclaim(None, 0.0)
    now[0] = now[0].replace(hour=21)
    await asyncio.sleep(0.1)
    assert lender.refuses()
    running.cancel()


async def test_new_hours_give_tasks_their_notice(lab: Lab) -> None:
    """Hours that are closed now do not kill what runs: tasks save, and the end counts as the owner's notice."""
    config = lab.config(owner=OWNER)
    saving = "trap 'echo saved > saved; exit 0' TERM; touch ready; while :; do sleep 0.05; done"
    launch = description(lab.region, config, saving, grace_s=30.0)
    lab.write(launch)
    run = lab.folder_of(launch, config)
    hour = datetime.now().hour
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async((run.work / "ready").exists)
        status = await _mizzen(config, "lend", "--hours", f"{(hour + 2) % 24:02}:00-{(hour + 3) % 24 or 24:02}:00")
        assert not status["lent"] and status["machine_at_s"] > status["now_s"] + 200.0
        outcome: NodeOutcome = await pending.result(NodeOutcome)
    assert (run.work / "saved").read_text() == "saved\n"
    assert outcome.notice is not None and outcome.notice.platform == "owner"


async def test_a_reclaim_ends_when_the_machine_is_lent_again(lab: Lab) -> None:
    """It waits for the tasks that must leave, not for those that come afterwards."""
    config = lab.config(owner=OWNER)
    launch = description(lab.region, config, "trap '' TERM; touch ready; while :; do sleep 0.05; done", grace_s=300.0)
    lab.write(launch)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async((lab.folder_of(launch, config).work / "ready").exists)
        waiting = asyncio.create_task(_mizzen(config, "reclaim", "--notice", "5m"))
        await until_async(lambda: LendingFile(config.state_dir).read().is_whole)
        await _mizzen(config, "lend")
        assert (await waiting)["lent"]
        await lab.stop(launch, config.machine, 0.0)


async def test_the_agent_answers_before_a_slow_status(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does not take an agent whose status takes seconds for one that is stopped."""
    config, status = lab.config(owner=OWNER), Lender.status

    def slow(self: Lender) -> dict[str, Any]:
        time.sleep(3.5)
        return status(self)

    async with lab.agent(config):
        await until_async((config.state_dir / "owner.sock").exists)
        monkeypatch.setattr(Lender, "status", slow)
        done = await asyncio.to_thread(_lent, config, "reclaim", "--now")
        monkeypatch.undo()
    assert (done.returncode, "does not answer" in done.stderr) == (0, False), done.stderr


async def test_a_word_that_is_being_heard_undoes_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner lends again, on a slow disk, while the agent takes over what was said without it.

    What the lending hours have taken is no word of the owner.
    """
    config = AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="k", cpus_milli=1000, memory_bytes=1 << 30, address="a",
        ports=(21000, 21099), state_dir=tmp_path / "state", gpus=2, gpu_type="g",
    )  # fmt: skip
    monkeypatch.setattr("agent.lending.lender._TICK_S", 0.01)
    word, adopted = OwnersWord(config.state_dir), OwnersWord.adopted

    def slowly(self: OwnersWord) -> None:
        time.sleep(0.2)
        adopted(self)

    monkeypatch.setattr(OwnersWord, "adopted", slowly)
    lender = Lender(config, StateFolder(config.state_dir), MachineNotices(None, {}), StartLocks())
    running = asyncio.create_task(lender.run())
    word.write(OwnerRecord().taking(None, 60.0))
    await until_async(lambda: lender.lending.is_whole and word.read() is None)
    word.write(OwnerRecord().taking(frozenset({1}), 60.0))
    await lender.lend(None, None)
    await asyncio.sleep(0.1)
    assert not lender.refuses([1]) and word.read() is None
    running.cancel()
    file = FileWithoutAgent(config.state_dir)
    file.write(OwnerRecord().taking(None, 50.0, by_hours=True).taking(frozenset({0}), 60.0))
    said = word.read()
    assert said is not None and not said.is_whole and said.gpus_at_s == {0: 60.0}
