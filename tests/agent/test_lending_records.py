"""What an owner has said outlasts the agent, its disk and its state folder, and holds without an agent."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import records, tasks
from agent.config import AgentConfig
from agent.host import serve
from agent.lending.hours import LendingHours
from agent.lending.lender import Lender
from agent.lending.owner_record import LendingFile, OwnerRecord
from agent.lending.owner_request import FileWithoutAgent, OwnersWord
from agent.locks import StartLocks
from agent.notices import MachineNotices
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.protocol.activities import Activity
from domain.protocol.machines import Attend, NodeOutcome
from infra.errors import ConfigurationError
from infra.temporal_client import connect
from tests.agent.harness import Lab, description, processes_of, task_launch, until_async

OWNER = str(os.getuid())


STUBBORN = "trap '' TERM; while :; do sleep 0.05; done"


_COMMAND = Path(sys.executable).parent / "mizzen"


def _lent(config: AgentConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the owner's command line."""
    command = [str(_COMMAND), *arguments, "--socket", str(config.state_dir / "owner.sock")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def _mizzen(config: AgentConfig, *arguments: str) -> dict[str, Any]:
    """Runs the owner's command line, and returns the status that it prints."""
    done = await asyncio.to_thread(_lent, config, *arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def test_the_owner_learns_that_no_agent_runs(tmp_path: Path) -> None:
    """The message names the socket of a killed agent, and, without `--socket`, those of `mizzen up` in the folder."""
    machine = tmp_path / "mizzen-data" / "machines" / "r.c.m"
    machine.mkdir(parents=True)
    # The path of a test's folder may be too long for a socket.
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('owner.sock')"
    subprocess.run([sys.executable, "-c", bind], cwd=machine, timeout=60, check=True)
    named = f"--socket={machine / 'owner.sock'}"
    for arguments, code, message in (
        ([named], 6, "no agent runs there. No new work starts without it"),
        ([], 3, "`mizzen up` in this folder has mizzen-data/machines/r.c.m/owner.sock"),
    ):
        command = [str(_COMMAND), "reclaim", "--now", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("command", [STUBBORN, "sleep 600"], ids=["stubborn", "obedient"])
async def test_a_broken_disk_keeps_no_machine(lab: Lab, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """If nothing can be written, tasks are killed all the same, at once or at the end of a notice."""
    config = lab.config(owner=OWNER)
    launch = description(lab.region, config, command)
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: tasks.inspect(run) is TaskState.RUNNING)

        def broken(path: str, *_: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        for name in ("write_reserved", "write_durably", "reserve"):
            monkeypatch.setattr(records, name, broken)
        status = await _mizzen(config, "reclaim", *(["--now"] if command == STUBBORN else ["--notice", "1s"]))
        assert status["free"] and "lending.json" in status["problem"]
        assert processes_of(run.path) == []
        monkeypatch.undo()


def test_a_damaged_record_lends_nothing(tmp_path: Path) -> None:
    """The record survives a full disk as far as space was reserved, and is read as it was written."""
    file = LendingFile(tmp_path)
    assert file.read() == OwnerRecord()
    file.reserve()
    taken = OwnerRecord(hours=LendingHours.parse("08:00-09:00")).taking(frozenset(range(62)), 12.5).taking(None, 9.0)
    file.write(taken)
    assert file.read() == taken and taken.refuses([]) and taken.lending(frozenset({3}), 62).refuses([4])
    assert not taken.lending(frozenset({3}), 62).refuses([3])
    config = AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="k", cpus_milli=1000, memory_bytes=1 << 30, address="a",
        ports=(21000, 21099), state_dir=tmp_path,
    )  # fmt: skip
    sound = file.read().to_json()
    damaged = ["{", "[]", *(json.dumps(sound | one) for one in ({"gpus_at_s": []}, {"machine_at_s": "x"}))]
    for text in [*damaged, json.dumps(sound | {"given_gpu_s": float("nan")}), json.dumps({"hours": None})]:
        (tmp_path / "lending.json").write_text(text)
        lender = Lender(config, StateFolder(tmp_path), MachineNotices(None, {}), StartLocks())
        assert lender.refuses() and lender.problem is not None, text


_AGENT = """
import sys
from agent.config import AgentConfig
from agent.host import run_agent
from infra.config.services import TemporalSettings
run_agent(AgentConfig.model_validate_json(sys.argv[1]), TemporalSettings(address=sys.argv[2]))
"""


@contextlib.contextmanager
def _process(config: AgentConfig, lab: Lab) -> Iterator[subprocess.Popen[bytes]]:
    """Runs an agent in a process of its own."""
    command = [sys.executable, "-c", _AGENT, config.model_dump_json(), lab.temporal.address or ""]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.rotating
async def test_the_owner_of_a_stopped_agent_takes_the_machine(lab: Lab) -> None:
    """The command stops the tasks itself. The agent obeys when it continues, and starts nothing before that."""
    config = lab.config(gpus=2, gpu_type="g", owner=OWNER)
    launch = description(lab.region, config, STUBBORN, "sleep 600")
    lab.write(launch)
    runs = [lab.folder_of(launch, config, task=task) for task in range(2)]
    with _process(config, lab) as agent:
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs), 60.0)
        agent.send_signal(signal.SIGSTOP)
        status = await _mizzen(config, "reclaim", "--now")
        assert (status["free"], status["lent"], status["running"]) == (True, False, [])
        assert all(tasks.inspect(run) is TaskState.ENDED for run in runs)
        other = description(lab.region, config, "sleep 600")
        lab.write(other)
        refused = await lab.run(other, config.machine, attempts=1)
        await asyncio.sleep(0.5)
        agent.send_signal(signal.SIGCONT)
        await until_async(lambda: LendingFile(config.state_dir).read().is_whole, 60.0)
        assert not (await _mizzen(config, "lending"))["lent"]
        await until_async(lambda: OwnersWord(config.state_dir).read() is None)
        async with asyncio.timeout(60):  # Its open poll has brought the request, or the polls are closed for a while.
            assert (await refused.failure()).type == "TakenBack"
        assert (await _mizzen(config, "lend"))["lent"]
        assert not lab.folder_of(other, config).path.exists()
        assert _is_the_owners(await pending.result(NodeOutcome))


@pytest.mark.rotating
async def test_the_owner_of_a_dead_agent_takes_gpus(lab: Lab) -> None:
    """The command stops the tasks on these GPUs, and the next agent has the owner's word."""
    config = lab.config(gpus=2, gpu_type="g", owner=OWNER)
    launches = [description(lab.region, config, "sleep 600") for _ in range(2)]
    with _process(config, lab) as agent:
        for launch in launches:
            lab.write(launch)
        pending = [await lab.run(launch, config.machine) for launch in launches]
        runs = [lab.folder_of(launch, config) for launch in launches]
        await until_async(lambda: all(tasks.inspect(run) is TaskState.RUNNING for run in runs), 60.0)
        agent.kill()
        agent.wait()
    status = await _mizzen(config, "reclaim", "--notice", "5s", "--gpus", "0,1")
    assert status["free"] and list(status["gpus_at_s"]) == ["0", "1"]
    assert all(tasks.inspect(run) is TaskState.ENDED for run in runs)
    async with lab.agent(config):
        shown = await _mizzen(config, "lending")
        assert (shown["lent"], list(shown["gpus_at_s"])) == (True, ["0", "1"])
        assert all([_is_the_owners(await one.result(NodeOutcome)) for one in pending])


def _is_the_owners(outcome: NodeOutcome) -> bool:
    """Whether the tasks were ended by the owner: this is no failure of the workload."""
    return outcome.notice is not None and outcome.notice.platform == "owner" and bool(outcome.exits)


def test_a_word_outlasts_an_agent_that_was_stopped_during_a_write(tmp_path: Path) -> None:
    """The agent's older record replaces nothing that the owner has said; several words add up."""
    own, word = LendingFile(tmp_path), OwnersWord(tmp_path)
    FileWithoutAgent(tmp_path).write(OwnerRecord().taking(frozenset({1}), 50.0))
    own.write(OwnerRecord(given_gpu_s=7.0))
    said = word.read()
    assert said is not None and own.read().with_word(said).gpus_at_s == {1: 50.0}
    word.take()
    FileWithoutAgent(tmp_path).write(OwnerRecord().taking(None, 60.0))
    said = word.read()
    assert said is not None and (said.machine_at_s, said.gpus_at_s) == (60.0, {1: 50.0})
    word.adopted()
    own.reserve()
    assert (tmp_path / "word.json.reserve").stat().st_size == records.RESERVED_BYTES, "also on a full disk"
    said = word.read()
    assert said is not None and said.machine_at_s == 60.0, "the newer word was not part of what was adopted"
    (tmp_path / "word.json").write_text("{")
    damaged = word.read()
    assert damaged is not None and damaged.is_whole


def test_a_reclaim_without_an_agent_outlasts_its_command(tmp_path: Path) -> None:
    """After Ctrl-C closes the pipe that it writes its progress to, it still ends the tasks."""
    config = AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="k", cpus_milli=1000, memory_bytes=1 << 30, address="a",
        ports=(21000, 21099), state_dir=tmp_path,
    )  # fmt: skip
    run = StateFolder(tmp_path).attempt(f"wl-{tmp_path.name[-20:].replace('_', '-')}-{os.getpid()}", 1).run("main", 0)
    run.work.mkdir(parents=True)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    tasks.start(run, task_launch(run, "sh", "-c", STUBBORN))
    reader, writer = os.pipe()
    os.close(reader)
    request = json.dumps({"gpus": None, "notice_s": 2.0})
    command = [sys.executable, "-P", "-m", "agent.lending.emergency_reclaim", str(tmp_path), request]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    state = tasks.inspect(run)
    tasks.request_stop(run, 0.0, told=True)
    assert (done.returncode, done.stderr, state) == (0, "", TaskState.ENDED)


@pytest.mark.parametrize("command", ["rm -rf", "mv -t aside"])
async def test_an_agent_without_its_state_folder_ends(lab: Lab, command: str) -> None:
    """It refuses launches at once, its machine is lost, its tasks get their notice and end, and it says why.

    Also if its setting names the folder by a link, and the folder was moved. Nothing stays mounted.
    """
    folder, link, saved = lab.folder / "real", lab.folder / "link", lab.folder / "saved"
    for path in (folder, lab.folder / "aside"):
        path.mkdir()
    link.symlink_to(folder)
    is_deleted = command == "rm -rf"
    used = folder if is_deleted else link
    config = lab.config(gpus=2, gpu_type="g", owner=OWNER, state_dir=used)
    # Opened before, because the deletion of the private /tmp also removes what is mounted in it for the task.
    saving = f"trap 'echo saved >&3; exit 0' TERM; exec 3> {saved}; while :; do sleep 0.05; done"
    launch = description(lab.region, config, saving)
    other = description(lab.region, config, "sleep 600")
    for one in (launch, other):
        lab.write(one)
    serving = asyncio.create_task(serve(config, lambda: connect(lab.temporal)))
    attending = await lab.start(Activity.ATTEND, config.machine, await _attend(config))
    await lab.run(launch, config.machine)
    run = lab.folder_of(launch, config)
    await until_async(saved.exists)
    subprocess.run([*command.split(), str(folder)], cwd=lab.folder, stderr=subprocess.DEVNULL, check=False)
    refused = await (await lab.run(other, config.machine)).failure()
    assert refused.type == "MachineFault" and "was deleted or replaced" in str(refused)
    assert (await attending.failure()).type == "MachineFault"
    with pytest.raises(ConfigurationError, match=r"was deleted or replaced while the agent ran; .* machines trust"):
        await serving
    assert saved.read_text() == "saved\n"
    assert not run.path.exists()
    await until_async(lambda: not [pid for pid in processes_of(used) if pid != os.getpid()])
    assert str(lab.folder) not in Path("/proc/self/mounts").read_text()


async def _attend(config: AgentConfig) -> Attend:
    await until_async((config.state_dir / "incarnation").exists)
    return Attend(config.machine, StateFolder(config.state_dir).incarnation(), [])
