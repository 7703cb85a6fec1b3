"""Memory servers that agents hold: real agents on a real Temporal; trainings are killed, and machines are lost."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.config import AgentConfig
from agent.isolation import TENANT_UIDS, why_not
from agent.memory_servers import end_servers
from agent.state import StateFolder
from domain.ids import checkpoint_prefix
from domain.isolation import Isolation, TaskNetwork
from domain.launch import LaunchDescription
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeOutcome, StopNode
from tests.agent.harness import Lab, description, needs_sandbox, own_address, until, until_async

_POOL = 64 << 20
TRAINING = """
import os, sys, time, warnings
from mizzen.checkpoint import Checkpointer, CheckpointSettings, Tiers
steps, ends, size, go = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
rare = {"machine_mtbf_s": 1e12, "both_mtbf_s": 1e13, "process_mtbf_s": 1.0}
tiers = Tiers(peers=int(os.environ["MIZZEN_GANG_MACHINES"]) > 1, **rare)
checkpointer = Checkpointer(interval_s=0, settings=CheckpointSettings(tiers=tiers, agree=lambda number: number))
state = {"w": b""}
checkpointer.track(state=state)
begin = checkpointer.restore()
print("begins", begin, len(state["w"]), os.environ.get("MIZZEN_MEMORY_PEER", "alone"))
for step in range(begin + 1, steps + 1):
    state["w"] = bytes([step]) * size
    print("saved", step, checkpointer.step(step).name)
    while os.path.exists(go) and step == steps:
        time.sleep(0.05)
if ends == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def ended(tmp_path: Path) -> Iterator[None]:
    """Ends the servers of all machines of the test."""
    yield
    for folder in (tmp_path / "state").glob("*"):
        end_servers(StateFolder(folder))


def machine(lab: Lab, name: str = "m1", **changes: Any) -> AgentConfig:
    seen = lab.folder / "seen"
    seen.mkdir(exist_ok=True)
    changes.setdefault("paths", (f"{seen}:rw",))
    number = int(name[1:])
    ports = (21100 + 10 * number, 21109 + 10 * number)
    return lab.config(name, checkpoint_memory_bytes=_POOL, memory_bytes=512 << 20, ports=ports, **changes)


def training(
    lab: Lab, configs: list[AgentConfig], steps: int, ends: str = "", *, attempt: int = 1, workload_id: str = "wl-1",
    memory: int = 448 << 20, size: int = 1 << 20, tenant_number: int = 0,
) -> LaunchDescription:  # fmt: skip
    """Returns an attempt with a task on each machine: rank 0 trains, the others wait."""
    script = lab.folder / "seen" / "training.py"
    script.write_text(TRAINING)
    go = lab.folder / "seen" / "hold"
    train = f'exec "$MIZZEN_PYTHON" -W always {script} {steps} "{ends}" {size} {go}'
    wait = f'exec "$MIZZEN_PYTHON" -W always {script} 0 "" 1 {go}'
    commands = [train, *[f"{wait}; sleep 1000" for _ in configs[1:]]]
    launch = description(lab.region, configs[0], *commands, workload_id=workload_id, attempt=attempt)
    body = launch.model_dump()
    body["checkpoint"]["uri"] = f"{lab.bucket_url}/{checkpoint_prefix(workload_id)}"
    body["checkpoint"]["interval_s"] = None
    body["tenant_number"] = tenant_number
    body["addresses"] = {config.machine: config.address for config in configs}
    names = [config.machine for config in configs]
    if len(names) > 1:
        body["memory_peers"] = dict(zip(names, [*names[1:], names[0]], strict=True))
    for place, config in zip(body["tasks"], configs, strict=True):
        place |= {"machine": config.machine, "memory_bytes": memory, "cpus_milli": 500}
        place |= {"local_rank": 0, "local_world_size": 1, "node_rank": place["rank"]}
    body["jobs"]["main"]["script"] = body["jobs"]["main"]["script"].replace("exec ", "")
    return LaunchDescription.model_validate(body)


def said(lab: Lab, launch: LaunchDescription, rank: int = 0) -> str:
    return lab.log(launch, task=rank)[0].decode()


def forget_parts(lab: Lab, launch: LaunchDescription) -> None:
    """Removes all parts of the bucket, so that nothing can be loaded from it."""
    shutil.rmtree(lab.folder / "bucket" / checkpoint_prefix(launch.workload_id) / "parts")


def server_pid(config: AgentConfig, workload_id: str = "wl-1") -> int | None:
    """Returns the pid of a running server, by its lock."""
    lock = config.state_dir / "memory" / workload_id / "server.lock"
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid = int(lock.read_text())
        return pid if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" else None
    return None


async def run(lab: Lab, launch: LaunchDescription, config: AgentConfig) -> NodeOutcome:
    outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    return outcome


async def test_a_killed_task_continues_from_the_memory_of_its_machine(lab: Lab) -> None:
    """After kill -9, the next attempt loads the newest step from memory, and reads no part of the bucket."""
    config = machine(lab)
    async with lab.agent(config):
        first = training(lab, [config], 5, "killed")
        lab.write(first)
        assert not (await run(lab, first, config)).succeeded
        await until_async(lambda: "saved 5" in said(lab, first), 90.0)
        assert server_pid(config) is not None, said(lab, first)
        forget_parts(lab, first)
        second = training(lab, [config], 7, attempt=2)
        lab.write(second)
        assert (await run(lab, second, config)).succeeded
        await until_async(lambda: "saved 7" in said(lab, second), 90.0)
        assert "begins 5 1048576" in said(lab, second), said(lab, first) + said(lab, second)
        assert server_pid(config) is None and not (config.state_dir / "memory" / "wl-1").exists()


@pytest.mark.rotating
async def test_a_lost_machine_continues_from_the_memory_of_its_peer(lab: Lab) -> None:
    """The machine that trained is lost; the next attempt, on another one, loads from the memory of the peer."""
    await _continues_from_its_peer(lab)


@pytest.mark.rotating
async def test_tasks_with_a_network_of_their_own_reach_the_peer(lab: Lab) -> None:
    """With `tasks.network: ports`, too: the servers are in the machines' network, and tasks connect to them."""
    uid = TENANT_UIDS[0] if os.geteuid() == 0 else None
    if (why := why_not(Isolation.SANDBOX, lab.folder, uid, TaskNetwork.PORTS)) is not None:
        pytest.skip(why)
    if (address := own_address()) is None:
        pytest.skip("this machine has no address but loopback")
    await _continues_from_its_peer(lab, isolation=Isolation.SANDBOX, network=TaskNetwork.PORTS, address=address)


async def _continues_from_its_peer(lab: Lab, **changes: Any) -> None:
    one, other, new = (machine(lab, name, **changes) for name in ("m1", "m2", "m3"))
    hold = lab.folder / "seen" / "hold"
    hold.touch()
    async with contextlib.AsyncExitStack() as stack:
        for config in (other, new):
            await stack.enter_async_context(lab.agent(config))
        first = training(lab, [one, other], 5)
        lab.write(first)
        await lab.run(first, other.machine)
        await until_async(lambda: server_pid(other) is not None, 90.0)
        async with lab.agent(one):
            await lab.run(first, one.machine)
            await until_async(lambda: "saved 5" in said(lab, first), 90.0)
            assert f"begins 0 0 {other.machine}" in said(lab, first)
            await lab.stop(first, one.machine, 0.0)
        end_servers(StateFolder(one.state_dir))  # All that a loss of the machine ends.
        assert server_pid(one) is None
        stopped = await lab.stop(first, other.machine, 0.0)
        assert stopped.stopped
        forget_parts(lab, first)
        hold.unlink()
        second = training(lab, [new, other], 6, attempt=2)
        lab.write(second)
        outcome = await run(lab, second, new)
        assert outcome.succeeded, said(lab, second)
        await until_async(lambda: "saved 6" in said(lab, second), 90.0)
        assert "begins 5 1048576" in said(lab, second), said(lab, second)
        await lab.stop(second, other.machine, 0.0)


STRANGER = """
import os, socket, sys
from pathlib import Path
for name in ("server.sock", "start.sock"):
    path = Path(sys.argv[1], name)
    try:
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(path))
        link.settimeout(5)
        print(name, "connected", len(link.recv(1)))
    except OSError as error:
        print(name, type(error).__name__)
from mizzen.memory.connection import remote_server
server = remote_server("127.0.0.1", int(sys.argv[2]), b"0" * 32)
try:
    server.greet()
    print("port connected")
except OSError as error:
    print("port", type(error).__name__)
"""


@needs_sandbox
async def test_another_workload_cannot_read_it(lab: Lab) -> None:
    """A task of another workload, of the same or another tenant, does not see the sockets, and is refused at the port
    because it has no token.
    """
    one, other = machine(lab, "m1"), machine(lab, "m2")
    (lab.folder / "seen" / "hold").touch()
    (lab.folder / "seen" / "stranger.py").write_text(STRANGER)
    async with lab.agent(one), lab.agent(other):
        first = training(lab, [one, other], 3, memory=200 << 20)
        lab.write(first)
        await lab.run(first, one.machine)
        await until_async(lambda: "saved 3" in said(lab, first), 90.0)
        bucket = lab.folder / "bucket" / checkpoint_prefix("wl-1") / "memory" / "servers"
        [port] = {json.loads(path.read_text())["port"] for path in bucket.iterdir()}
        folder = one.state_dir / "memory" / "wl-1"
        for number in (0, 1):
            command = f'"$MIZZEN_PYTHON" {lab.folder}/seen/stranger.py {folder} {port}'
            launch = description(lab.region, one, command, workload_id=f"wl-{2 + number}", tenant_number=number)
            lab.write(launch)
            assert (await run(lab, launch, one)).succeeded
            await until_async(lambda launch=launch: "port" in said(lab, launch), 90.0)
            text = said(lab, launch)
            assert "server.sock FileNotFoundError" in text and "start.sock FileNotFoundError" in text
            assert "port ConnectionError" in text
        (lab.folder / "seen" / "hold").unlink()
        await lab.stop(first, one.machine, 0.0)


async def test_the_limit_of_the_machine(lab: Lab) -> None:
    """A workload gets a share of the machine's memory for checkpoints in proportion to its own; beyond it, a save to
    memory is a warning; the memory of a server counts for the server, not for the task; a workload without a task
    makes room.
    """
    config = machine(lab)
    async with lab.agent(config):
        large = training(lab, [config], 3, "killed", memory=224 << 20, size=20 << 20)
        lab.write(large)
        await run(lab, large, config)
        await until_async(lambda: "saved 3" in said(lab, large), 90.0)
        assert "bytes of memory are free" in said(lab, large)
        small = training(lab, [config], 3, "killed", workload_id="wl-2", memory=448 << 20, size=12 << 20)
        lab.write(small)
        await run(lab, small, config)
        await until_async(lambda: "saved 3" in said(lab, small), 90.0)
        assert "Warning" not in said(lab, small), said(lab, small)
        record = json.loads((config.state_dir / "memory" / "wl-2" / "server.json").read_text())
        assert record["limit_bytes"] == _POOL
        assert server_pid(config, "wl-1") is None and server_pid(config, "wl-2") is not None
        if record["cgroups"]:
            assert any("memory" in path or "mizzen" in path for path in record["cgroups"])
            used = max(_used_bytes(path) for path in record["cgroups"])
            assert 24 << 20 <= used <= _POOL + (64 << 20)


def _used_bytes(cgroup: str) -> int:
    for name in ("memory.current", "memory.usage_in_bytes"):
        with contextlib.suppress(OSError):
            return int(Path(cgroup, name).read_text())
    return 0


@pytest.mark.rotating
async def test_the_server_outlives_the_agent(lab: Lab) -> None:
    """The server continues while no agent runs; the next agent finds it, and starts one that was killed."""
    config = machine(lab)
    hold = lab.folder / "seen" / "hold"
    hold.touch()
    launch = training(lab, [config], 3)
    lab.write(launch)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: "saved 3" in said(lab, launch), 90.0)
        before = server_pid(config)
    assert before is not None and server_pid(config) == before
    os.kill(before, signal.SIGKILL)
    until(lambda: server_pid(config) is None)
    async with lab.agent(config):
        await lab.stop(launch, config.machine, 0.0)
        hold.unlink()
        again = training(lab, [config], 6, "killed", attempt=2)
        lab.write(again)
        await run(lab, again, config)
        await until_async(lambda: "saved 6" in said(lab, again), 90.0)
        assert server_pid(config) not in (None, before)
        kept = server_pid(config)
    async with lab.agent(config):
        assert server_pid(config) == kept
        last = training(lab, [config], 7, attempt=3)
        lab.write(last)
        assert (await run(lab, last, config)).succeeded
        await until_async(lambda: "saved 7" in said(lab, last), 90.0)
        assert "begins 6" in said(lab, last)


async def test_a_cancelled_workload_leaves_nothing(lab: Lab) -> None:
    """A stop that ends the workload ends its server; so does an owner who takes the machine."""
    config = machine(lab)
    (lab.folder / "seen" / "hold").touch()
    async with lab.agent(config):
        launch = training(lab, [config], 2)
        lab.write(launch)
        await lab.run(launch, config.machine)
        await until_async(lambda: server_pid(config) is not None and "saved 2" in said(lab, launch), 90.0)
        request = StopNode("wl-1", 1, 0.0, ends=True)
        await (await lab.start(Activity.STOP_NODE, config.machine, request)).result(NodeOutcome)
        assert server_pid(config) is None and not (config.state_dir / "memory" / "wl-1").exists()
