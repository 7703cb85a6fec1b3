"""Several machines on one computer: agents as processes that are killed, restarted, powered off and stopped."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import agent
from agent import tasks
from agent.config import AgentConfig
from agent.fleet import power_off
from agent.processes import ProcessIdentity
from agent.state import POWERED_OFF, StateFolder
from agent.tasks import TaskState
from domain.ids import CONTROL_QUEUE, machine_workflow_id
from domain.protocol.machines import NodeOutcome
from infra.config.services import TemporalSettings
from infra.errors import ConfigurationError
from infra.stack.ports import free_port
from infra.temporal_client import connect
from tests.agent.fleet_process import main
from tests.agent.harness import (
    STUBBORN,
    HelloWorkflow,
    Lab,
    description,
    dev_server,
    processes_of,
    until,
    until_async,
)

MACHINE = (
    '{"machine": "r/c/m", "region": "r", "cluster": "c", "rack": "k", "cpus_milli": 1, "memory_bytes": 1,'
    ' "address": "a", "ports": [1, 2], "state_dir": "/nowhere"}'
)
WAIT = "while [ ! -e go ]; do sleep 0.05; done"


@contextlib.contextmanager
def fleet(folder: Path, temporal: TemporalSettings, *configs: AgentConfig) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `tests.agent.fleet_process` with these machines and sends it SIGTERM at the end."""
    file = folder / "fleet.json"
    machines = [config.model_dump(mode="json") for config in configs]
    file.write_text(json.dumps({"temporal": temporal.model_dump(mode="json"), "machines": machines}))
    root = Path(agent.__file__).parent.parent
    with (folder / "fleet.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "tests.agent.fleet_process", str(file)], cwd=root, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def agent_of(config: AgentConfig, other_than: ProcessIdentity | None = None) -> ProcessIdentity:
    """Waits for the running agent of a machine and returns its identity."""

    def look() -> ProcessIdentity | None:
        found = StateFolder(config.state_dir).agent()
        return found if found is not None and found.alive() and found != other_than else None

    found: ProcessIdentity = until(look)
    return found


@pytest.mark.rotating
async def test_a_killed_agent_misses_nothing(lab: Lab) -> None:
    """If a task ends while its agent is dead after kill -9, the next agent reports the true exit code."""
    config, other = lab.config("m1"), lab.config("m2")
    launch = description(lab.region, config, f"{WAIT}; echo away; exit 7", "echo here; sleep 600")
    lab.write(launch)
    with fleet(lab.folder, lab.temporal, config, other):
        pending = await lab.run(launch, config.machine)
        runs = [lab.folder_of(launch, config, task=task) for task in range(2)]
        await until_async(lambda: all(run.identities() for run in runs))
        neighbour = agent_of(other)
        first = agent_of(config)
        (config.state_dir / POWERED_OFF).touch()  # Delays the start of the next agent.
        assert first.send(signal.SIGKILL)
        await until_async(lambda: not first.alive())
        assert [tasks.inspect(run) for run in runs] == [TaskState.RUNNING] * 2
        (runs[0].work / "go").touch()
        await until_async(lambda: runs[0].exit())
        (config.state_dir / POWERED_OFF).unlink()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert [(e.task, e.exit_code, e.signal) for e in outcome.exits] == [(0, 7, None), (1, None, 15)]
        assert runs[0].output.read_text() == "away\n"
        assert agent_of(other) == neighbour
        await until_async(lambda: lab.log(launch, task=0)[1] and lab.log(launch, task=1)[1])
    assert [lab.log(launch, task=task)[0] for task in range(2)] == [b"away\n", b"here\n"]
    assert processes_of(lab.folder) == []


@pytest.mark.rotating
async def test_power_off_is_the_death_of_a_machine(lab: Lab) -> None:
    """Power-off kills the agent, shims and tasks of one machine without an exit record, and its next boot has a new id.

    Other machines are not affected.
    """
    config, other = lab.config("m1"), lab.config("m2")
    dead = description(lab.region, config, f"exec {sys.executable} -I -S s.py", files={"s.py": STUBBORN})
    alive = description(lab.region, other, f"{WAIT}; exit 0")
    for launch in (dead, alive):
        lab.write(launch)
    with fleet(lab.folder, lab.temporal, config, other):
        lost = await lab.run(dead, config.machine)
        lives = await lab.run(alive, other.machine)
        run = lab.folder_of(dead, config)
        await until_async(lambda: run.output.exists() and b"ready" in run.output.read_bytes())
        await until_async(lambda: lab.folder_of(alive, other).identities())
        first = agent_of(config)
        incarnation = StateFolder(config.state_dir).incarnation()
        await asyncio.to_thread(power_off, config.state_dir)
        assert not first.alive()
        assert processes_of(config.state_dir) == []
        assert run.exit() is None
        await asyncio.to_thread(power_off, config.state_dir)
        (config.state_dir / POWERED_OFF).unlink()
        assert agent_of(config, other_than=first)
        assert StateFolder(config.state_dir).incarnation() != incarnation
        outcome: NodeOutcome = await lost.result(NodeOutcome)
        assert [(e.exit_code, e.signal) for e in outcome.exits] == [(None, None)]
        assert not outcome.stopped
        (lab.folder_of(alive, other).work / "go").touch()
        assert [e.exit_code for e in (await lives.result(NodeOutcome)).exits] == [0]


@pytest.mark.rotating
async def test_stopping_the_fleet_stops_no_task(lab: Lab) -> None:
    """After SIGKILL or SIGTERM to the fleet, no agent is left and tasks continue; the next fleet finds them."""
    config = lab.config()
    first = description(lab.region, config, f"{WAIT}; exit 4")
    second = description(lab.region, config, "sleep 600")
    for launch in (first, second):
        lab.write(launch)
    run, later = lab.folder_of(first, config), lab.folder_of(second, config)
    with fleet(lab.folder, lab.temporal, config) as parent:
        pending = await lab.run(first, config.machine)
        await until_async(lambda: run.identities())
        killed = agent_of(config)
        parent.kill()
        parent.wait()
        await until_async(lambda: not killed.alive())
    assert tasks.inspect(run) is TaskState.RUNNING
    with fleet(lab.folder, lab.temporal, config):
        (run.work / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [4]
        await lab.run(second, config.machine)
        await until_async(lambda: later.identities())
        stopped = agent_of(config)
    assert not stopped.alive()
    assert tasks.inspect(later) is TaskState.RUNNING
    tasks.request_stop(later, 0, told=True)
    await until_async(lambda: later.exit())


@pytest.mark.rotating
async def test_temporal_may_come_late_and_be_lost(tmp_path: Path) -> None:
    """An agent waits until Temporal is reachable, and announces itself again to a server that has lost its data."""
    port = free_port()
    temporal = TemporalSettings(address=f"127.0.0.1:{port}")
    lab = Lab(tmp_path, temporal, None, "")  # type: ignore[arg-type]
    config = lab.config(hello_interval_s=0.3)

    async def hello() -> dict[str, Any]:
        client = await connect(temporal)
        async with Worker(
            client,
            task_queue=CONTROL_QUEUE,
            workflows=[HelloWorkflow],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            machine = client.get_workflow_handle(machine_workflow_id(config.machine))
            while True:
                with contextlib.suppress(Exception):
                    heard: list[dict[str, Any]] = await machine.query("hellos")
                    if heard:
                        return heard[0]
                await asyncio.sleep(0.1)

    with fleet(tmp_path, temporal, config):
        only = await asyncio.to_thread(agent_of, config)
        with dev_server(port):
            first = await asyncio.wait_for(hello(), 30)
        with dev_server(port):
            second = await asyncio.wait_for(hello(), 60)
        assert first["machine"] == second["machine"] == config.machine
        assert first["incarnation"] == second["incarnation"]
        assert only.alive()


def test_an_agent_is_light() -> None:
    """The agent imports no database, server or scheduler, and `agent.launch` does not import Temporal."""
    code = (
        "import sys, agent.launch\n"
        "assert 'temporalio' not in sys.modules\n"
        "import agent.fleet\n"
        "heavy = ['sqlalchemy', 'fastapi', 'psycopg', 'numpy', 'infra.db', 'api', 'activities', 'workflows', 'boto3']\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(agent.__file__).parent.parent, check=True)


async def test_a_state_folder_has_one_agent(tmp_path: Path) -> None:
    """A second agent for a state folder fails with an error that names the folder and the first agent's pid."""
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    first.acquire()
    with pytest.raises(ConfigurationError, match=f"state_dir.*pid {os.getpid()}"):
        second.acquire(patience_s=0.1)
    first.release()
    second.acquire(patience_s=0.1)
    second.release()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{}", "machines"),
        ('{"temporal": {"address": "127.0.0.1:1"}, "machines": [{"machine": "x"}]}', "cpus_milli"),
        (f'{{"temporal": {{}}, "machines": [{MACHINE}, {MACHINE}]}}', "machine: must be different for each machine"),
    ],
)
def test_files_that_make_no_sense(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    said: str,
) -> None:
    """A missing or invalid fleet file is reported as an error that names the field, with exit code 2."""
    file = tmp_path / "fleet.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["agent", str(file)])
    assert main() == 2
    assert said in capsys.readouterr().err
