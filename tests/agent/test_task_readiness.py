"""Tasks that serve requests: their ports, their readiness in heartbeats, and the end of a task that is never ready."""

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.cgroups import make_cgroup, remove_cgroup
from agent.config import AgentConfig
from agent.port_maps import map_port
from agent.ports import SERVING
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, RunNode
from domain.task_reports import NotReadyReport
from infra.stack.ports import free_port
from tests.agent.harness import PYTHON, Lab, Pending, description, digest, needs_sandbox, sealed_for
from tests.agent.test_fleet import agent_of, fleet

SERVER = """
import http.server, os, pathlib, socket, sys, urllib.request
folder = pathlib.Path.cwd()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        (folder / "key").write_text(self.headers.get("X-Key", ""))
        status = folder / "status"
        self.send_response(int(status.read_text()) if status.exists() else 200)
        body = os.environ["MIZZEN_RUN_ID"].encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if "ipv6" in sys.argv else socket.AF_INET

(folder / "port").write_text(os.environ.get("MIZZEN_PORT", "none"))
Server(("", int(os.environ["MIZZEN_PORT"])), Handler).serve_forever()
"""


def _mappable() -> bool:
    cgroup = make_cgroup(f"probe-{os.getpid()}")
    if cgroup is None:
        return False
    try:
        map_port(cgroup, 8080, 8081)
    except OSError:
        return False
    finally:
        remove_cgroup(cgroup)
    return True


needs_maps = pytest.mark.skipif(not _mappable(), reason="maps of ports need root, cgroup v2 and eBPF")


def _serving(
    lab: Lab, config: AgentConfig, *commands: str, port: int | None = None, setup: str | None = None, **probe: Any
) -> LaunchDescription:
    """Returns an attempt whose task 0 serves; `commands` default to the server."""
    launch = description(
        lab.region,
        config,
        *(commands or (f"exec {PYTHON} server.py",)),
        files={"server.py": SERVER},
        serving={"port": port, "probe": {"interval_s": 0.2, "timeout_s": 2.0} | probe},
    )
    jobs = {"main": launch.jobs["main"].model_copy(update={"setup": setup})}
    return launch.model_copy(update={"jobs": jobs})


async def _run(lab: Lab, launch: LaunchDescription, config: AgentConfig) -> Pending:
    """Starts an attempt so that no regular heartbeat is due during the test."""
    key = lab.write(launch)
    request = RunNode(launch.workload_id, launch.attempt, config.machine, key, lab.bucket_url, {}, digest(launch))
    return await lab.start(Activity.RUN_NODE, config.machine, request, heartbeat_timeout_s=1200.0)


async def _reported(pending: Pending, holds: Callable[[dict[str, Any]], bool], task: int = 0) -> dict[str, Any]:
    """Waits until a heartbeat has a report of readiness for which `holds` is true, and returns the report."""

    async def look() -> dict[str, Any]:
        while True:
            beat = await pending.heartbeat()
            report = beat and beat["progress"][task]["serving"]
            if report and holds(report):
                found: dict[str, Any] = report
                return found
            await asyncio.sleep(0.05)

    return await asyncio.wait_for(look(), 30)


def _fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as response:
        text: str = response.read().decode()
        return text


def _quiet(config: AgentConfig) -> AgentConfig:
    return config.model_copy(update={"heartbeat_interval_s": 300.0})


async def test_readiness_is_reported_when_it_changes(lab: Lab) -> None:
    """Heartbeats that are not due report that a task is ready, no longer ready, and ready again; the task runs on."""
    config = _quiet(lab.config())
    launch = _serving(lab, config, f"exec {PYTHON} server.py", "echo ${MIZZEN_PORT-unset}; sleep 600", path="/health")
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        pending = await _run(lab, launch, config)
        ready = await _reported(pending, lambda report: report["ready"])
        assert (ready["address"], ready["error"]) == ("127.0.0.1", None)
        assert config.ports[0] <= ready["port"] <= config.ports[1]
        assert (run.work / "port").read_text() == str(ready["port"])
        assert await asyncio.to_thread(_fetch, ready["port"]) == run.run_id
        (run.work / "status").write_text("503")
        unready = await _reported(pending, lambda report: not report["ready"])
        assert unready["error"] == f"GET /health on port {ready['port']}: status 503"
        assert unready["since_s"] > ready["since_s"] > 0
        assert tasks.inspect(run) is TaskState.RUNNING
        (run.work / "status").unlink()
        await _reported(pending, lambda report: report["ready"])
        beat = await pending.heartbeat()
        assert beat["progress"][1]["serving"] is None
        other = lab.folder_of(launch, config, task=1)
        assert other.output.read_text() == "unset\n"
        outcome = await lab.stop(launch, config.machine, 5.0)
        assert outcome.stopped and all(end.not_ready is None for end in outcome.exits)


async def test_headers_of_the_probe_have_secrets(lab: Lab) -> None:
    """The probe is sent with the value of a secret, and leaves other references as they are."""
    config = lab.config(heartbeat_interval_s=0.2)
    launch = _serving(lab, config, headers={"X-Key": "Bearer $TOKEN, $OTHER"}, secrets=("TOKEN",))
    box = sealed_for(config, {"main": {"TOKEN": "tok-1234"}})
    launch = launch.model_copy(update={"sealed_secrets": {config.machine: box}})
    async with lab.agent(config):
        pending = await _run(lab, launch, config)
        await _reported(pending, lambda report: report["ready"])
        assert (lab.folder_of(launch, config).work / "key").read_text() == "Bearer tok-1234, $OTHER"
        await lab.stop(launch, config.machine, 5.0)


async def test_a_few_failed_probes_are_tolerated(lab: Lab) -> None:
    """A ready task stays ready while fewer than `failures` probes in a row have failed; the error is reported."""
    config = lab.config(heartbeat_interval_s=0.2)
    launch = _serving(lab, config, failures=1_000_000)
    async with lab.agent(config):
        pending = await _run(lab, launch, config)
        await _reported(pending, lambda report: report["ready"])
        (lab.folder_of(launch, config).work / "status").write_text("500")
        report = await _reported(pending, lambda report: report["error"] is not None)
        assert report["ready"] and report["error"].endswith("status 500")
        await lab.stop(launch, config.machine, 5.0)


@pytest.mark.parametrize("on_notice", ["exit 0", "exit 3"])
async def test_a_task_that_is_never_ready_fails(lab: Lab, on_notice: str) -> None:
    """A task that is not ready in time is stopped with its peers, and has failed, whatever its exit code is."""
    config = lab.config()
    launch = _serving(
        lab, config, f"trap '{on_notice}' TERM; {PYTHON} server.py & wait", "sleep 600", initial_delay_s=1.0
    )
    launch.files["status"] = "500"
    async with lab.agent(config):
        outcome: NodeOutcome = await (await _run(lab, launch, config)).result(NodeOutcome)
        again = await lab.stop(launch, config.machine, 0.0)
    assert not outcome.stopped
    ends = {end.task: end for end in outcome.exits}
    port = StateFolder(config.state_dir).attempt(launch.workload_id, 1).ports()[SERVING]
    assert ends[0].not_ready in [
        NotReadyReport(1.0, f"GET / on port {port}: {error}") for error in ("status 500", "connection refused")
    ]
    assert (ends[0].exit_code, ends[0].succeeded) == (int(on_notice[-1]), False)
    assert (ends[1].signal, ends[1].not_ready) == (signal.SIGTERM, None)
    assert again.exits == outcome.exits


async def test_a_task_that_fails_before_it_is_ready_has_its_own_status(lab: Lab) -> None:
    """The end of a task by itself is not taken for a task that was stopped because it was not ready."""
    config = lab.config()
    launch = _serving(lab, config, "sleep 0.5; exit 3", initial_delay_s=60.0)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await _run(lab, launch, config)).result(NodeOutcome)
    assert [(end.exit_code, end.not_ready) for end in outcome.exits] == [(3, None)]


async def test_a_task_that_was_ready_is_not_ended(lab: Lab) -> None:
    """After a task was ready once, failed probes do not end it, even if its time to become ready is over."""
    config = _quiet(lab.config())
    launch = _serving(lab, config)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        pending = await _run(lab, launch, config)
        await _reported(pending, lambda report: report["ready"])
    stored = run.path.parent / "launch.json"
    body = json.loads(stored.read_text())
    body["serving"]["probe"]["initial_delay_s"] = 0.0
    stored.write_text(json.dumps(body))
    (run.work / "status").write_text("503")
    async with lab.agent(config):
        await _reported(pending, lambda report: not report["ready"])
        assert tasks.inspect(run) is TaskState.RUNNING and run.stop() is None
        assert json.loads((run.path / "serving.json").read_text())["unready"] is None
        await lab.stop(launch, config.machine, 5.0)


async def test_no_probe_is_sent_during_the_setup(lab: Lab) -> None:
    """A server that the setup starts gets no request; the task is ready after the setup."""
    config = _quiet(lab.config())
    setup = f"{PYTHON} server.py & sleep 1; kill $!; wait || true"
    launch = _serving(lab, config, setup=setup)
    async with lab.agent(config):
        pending = await _run(lab, launch, config)
        report = await _reported(pending, lambda report: True)
        assert report["ready"]
        begun_s = float((lab.folder_of(launch, config).path / "begun").read_text())
        assert report["since_s"] >= begun_s
        await lab.stop(launch, config.machine, 5.0)


async def test_a_setup_that_takes_too_long_is_not_ready(lab: Lab) -> None:
    """The time in which a task must become ready includes its setup."""
    config = lab.config()
    launch = _serving(lab, config, setup="sleep 600", initial_delay_s=0.5)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await _run(lab, launch, config)).result(NodeOutcome)
    assert [end.not_ready for end in outcome.exits] == [NotReadyReport(0.5, "its setup has not ended")]


@pytest.mark.rotating
async def test_an_agent_that_was_killed_continues_to_probe(lab: Lab) -> None:
    """After kill -9 of the agent, port and readiness are the same, and changes are reported again."""
    config = _quiet(lab.config())
    launch = _serving(lab, config, failures=2)
    run = lab.folder_of(launch, config)
    key = lab.write(launch)
    request = RunNode(launch.workload_id, 1, config.machine, key, lab.bucket_url, {}, digest(launch))
    with fleet(lab.folder, lab.temporal, config):
        pending = await lab.start(Activity.RUN_NODE, config.machine, request, heartbeat_timeout_s=4.0)
        before = await _reported(pending, lambda report: report["ready"])
        first = await asyncio.to_thread(agent_of, config)
        assert first.send(signal.SIGKILL)
        await asyncio.to_thread(agent_of, config, first)

        async def attached() -> Any:
            while (
                (state := await pending.state()) is None or state.attempt < 2 or not (beat := await pending.heartbeat())
            ):
                await asyncio.sleep(0.1)
            return beat

        beat = await asyncio.wait_for(attached(), 40)
        assert beat["progress"][0]["serving"] == before
        (run.work / "status").write_text("503")
        unready = await _reported(pending, lambda report: not report["ready"])
        assert unready["port"] == before["port"]
        await lab.stop(launch, config.machine, 5.0)


async def test_a_record_of_the_end_survives_a_restart(lab: Lab) -> None:
    """If the agent ends between its decision to stop a task that is not ready and the stop, the next agent stops it."""
    config = lab.config()
    launch = _serving(lab, config, initial_delay_s=600.0)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        pending = await _run(lab, launch, config)
        await _reported(pending, lambda report: report["ready"])
    record = json.loads((run.path / "serving.json").read_text())
    record["unready"] = {"limit_s": 600.0, "error": "status 500"}
    (run.path / "serving.json").write_text(json.dumps(record))
    async with lab.agent(config):
        outcome: NodeOutcome = await pending.result(NodeOutcome)
    assert [end.not_ready for end in outcome.exits] == [NotReadyReport(600.0, "status 500")]


@needs_maps
@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
async def test_replicas_with_the_same_fixed_port(lab: Lab, family: str) -> None:
    """Two tasks on one machine listen on the same port of their document; each reaches itself there, clients both."""
    config = _quiet(lab.config())
    fixed = free_port()
    launches = [_serving(lab, config, f"exec {PYTHON} server.py {family}", port=fixed) for _ in range(2)]
    runs = [lab.folder_of(launch, config) for launch in launches]
    async with lab.agent(config):
        pending = [await _run(lab, launch, config) for launch in launches]
        ports = [(await _reported(each, lambda report: report["ready"]))["port"] for each in pending]
        assert [(run.work / "port").read_text() for run in runs] == [str(fixed)] * 2
        assert len({fixed, *ports}) == 3
        assert [await asyncio.to_thread(_fetch, port) for port in ports] == [run.run_id for run in runs]
        with pytest.raises(OSError, match="refused"):  # Nothing listens on the port itself.
            await asyncio.to_thread(_fetch, fixed)
        for launch in launches:
            await lab.stop(launch, config.machine, 5.0)


_TALK = """
import os, socket, sys
port, machine = int(os.environ["MIZZEN_PORT"]), sys.argv[1]
with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("listens on", server.getsockname()[1])
    for address in ("127.0.0.1", "127.3.2.1", "0.0.0.0", "::1", "::ffff:127.0.0.1"):
        with socket.create_connection((address, port)) as client, server.accept()[0] as accepted:
            client.sendall(b"x")
            print(address, accepted.recv(1).decode(), accepted.getsockname()[1])
with socket.create_server(("127.0.0.1", int(sys.argv[2]))) as other:
    print("other port", other.getsockname()[1])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
    datagram.bind(("127.0.0.1", port))
    print("datagrams", datagram.getsockname()[1])
"""


@needs_maps
async def test_a_port_map_concerns_one_port_and_loopback(lab: Lab) -> None:
    """A task sees its fixed port on all loopback addresses; other ports and datagrams are not mapped."""
    config = lab.config()
    fixed, other = free_port(), free_port()
    launch = _serving(lab, config, f"{PYTHON} talk.py 127.0.0.1 {other}; exit 0", port=fixed)
    launch = launch.model_copy(update={"files": {"talk.py": _TALK}})
    async with lab.agent(config):
        outcome: NodeOutcome = await (await _run(lab, launch, config)).result(NodeOutcome)
    lines = lab.folder_of(launch, config).output.read_text().splitlines()
    addresses = ("127.0.0.1", "127.3.2.1", "0.0.0.0", "::1", "::ffff:127.0.0.1")
    expected = [f"listens on {fixed}", *(f"{address} x {fixed}" for address in addresses)]
    assert lines == [*expected, f"other port {other}", f"datagrams {fixed}"]
    assert [end.exit_code for end in outcome.exits] == [0]


async def test_a_fixed_port_that_cannot_be_mapped(lab: Lab) -> None:
    """Without a cgroup the first task gets the fixed port itself, and a second one is refused with its number.

    When the first has ended, the port is free again for the next one, in spite of connections in TIME_WAIT.
    """
    config = _quiet(lab.config(cgroup=False))
    fixed = free_port()
    first, second, third = (_serving(lab, config, port=fixed) for _ in range(3))
    async with lab.agent(config):
        pending = await _run(lab, first, config)
        report = await _reported(pending, lambda report: report["ready"])
        assert report["port"] == fixed
        assert (lab.folder_of(first, config).work / "port").read_text() == str(fixed)
        failure = await (await _run(lab, second, config)).failure()
        assert (failure.type, failure.non_retryable) == ("PortTaken", True)
        assert f"port {fixed} " in str(failure) and "$MIZZEN_PORT" in str(failure) and first.workload_id in str(failure)
        await lab.stop(first, config.machine, 5.0)
        pending = await _run(lab, third, config)
        assert (await _reported(pending, lambda report: report["ready"]))["port"] == fixed
        await lab.stop(third, config.machine, 5.0)


async def test_a_fixed_port_of_another_program_is_refused(lab: Lab, tmp_path: Path) -> None:
    """A port on which a program that is no task listens is refused too."""
    config = lab.config(cgroup=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        launch = _serving(lab, config, port=server.getsockname()[1])
        async with lab.agent(config):
            failure = await (await _run(lab, launch, config)).failure()
    assert failure.type == "PortTaken" and "Address already in use" in str(failure)


@needs_maps
@needs_sandbox
async def test_a_privileged_port_of_another_user(temporal_address: str, request: pytest.FixtureRequest) -> None:
    """A task that does not run as root can serve on port 80, because another port is bound in its place."""
    root = Path(tempfile.mkdtemp())  # Not below pytest's folder, which only its owner may enter.
    request.addfinalizer(lambda: shutil.rmtree(root))
    root.chmod(0o755)
    async with Lab.open(root, temporal_address) as lab:
        config = _quiet(lab.config(run_as="nobody", isolation=Isolation.SANDBOX))
        launch = _serving(lab, config, "id -un; exec $MIZZEN_PYTHON -I -S server.py", port=80)
        async with lab.agent(config):
            pending = await _run(lab, launch, config)
            report = await _reported(pending, lambda report: report["ready"])
            run = lab.folder_of(launch, config)
            assert await asyncio.to_thread(_fetch, report["port"]) == run.run_id
            assert run.output.read_text() == "nobody\n"
            await lab.stop(launch, config.machine, 5.0)


@pytest.mark.rotating
@needs_maps
async def test_a_refused_task_leaves_no_cgroup(lab: Lab) -> None:
    """If no port is free, the launch is refused and nothing of the task is left."""
    port = free_port()
    config = lab.config(ports=(port, port))
    launches = [_serving(lab, config) for _ in range(2)]
    async with lab.agent(config):
        pending = await _run(lab, launches[0], config)
        await _reported(pending, lambda report: report["ready"])
        failure = await (await _run(lab, launches[1], config)).failure()
        await lab.stop(launches[0], config.machine, 5.0)
    assert (failure.type, failure.non_retryable) == ("NoFreePort", True)
    assert "serving port of" in str(failure)
    cgroup = make_cgroup("own")
    assert cgroup is not None
    remove_cgroup(cgroup)
    assert not list(Path(cgroup).parent.glob(f"mizzen-{launches[1].workload_id}*"))
