"""Tasks in a network of their own: declared ports lead to them, and they do not reach the machine's loopback."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from agent.config import AgentConfig
from agent.isolation import TENANT_UIDS, why_not
from domain.isolation import Isolation, TaskNetwork
from domain.protocol.machines import NodeOutcome
from infra.stack.ports import free_port
from tests.agent.harness import Lab, own_address, processes_of, until_async
from tests.agent.test_task_readiness import PYTHON, SERVER, _fetch, _quiet, _reported, _run, _serving

_LOOK = """
import os, socket, sys
for host, port in (line.split() for line in open("targets")):
    try:
        with socket.create_connection((host, int(port)), 3) as found:
            print(host, "reached", flush=True)
    except OSError as error:
        print(host, error.strerror or "no answer", flush=True)
print(sorted(line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]))
"""


@pytest.fixture
def config(lab: Lab) -> AgentConfig:
    """A machine whose tasks have a network of their own."""
    uid = TENANT_UIDS[0] if os.geteuid() == 0 else None
    if (why := why_not(Isolation.SANDBOX, lab.folder, uid, TaskNetwork.PORTS)) is not None:
        pytest.skip(why)
    return _quiet(lab.config(isolation=Isolation.SANDBOX, network=TaskNetwork.PORTS))


async def test_only_declared_ports_lead_to_a_task(lab: Lab, config: AgentConfig) -> None:
    """Two attempts serve on the same fixed port; tasks of an attempt reach each other by loopback."""
    fixed = free_port()
    other = "exec $MIZZEN_PYTHON -I -S look.py"
    launches = [
        _serving(
            lab, config, f"exec {PYTHON} server.py", "until [ -e targets ]; do sleep 0.05; done; " + other, port=fixed
        )
        for _ in range(2)
    ]
    launches = [one.model_copy(update={"files": {"server.py": SERVER, "look.py": _LOOK}}) for one in launches]
    with socket.create_server(("127.0.0.1", 0)) as loopback, socket.create_server(("0.0.0.0", 0)) as everywhere:
        targets = [
            ("127.0.0.1", fixed),
            ("localhost", loopback.getsockname()[1]),
            ("10.0.2.2", loopback.getsockname()[1]),
            ("169.254.169.254", 80),
            ("::ffff:169.254.169.254", 80),
            ("fd00:ec2::254", 80),
        ]
        if (address := own_address()) is not None:
            targets.append((address, everywhere.getsockname()[1]))
        async with lab.agent(config):
            pending = [await _run(lab, launch, config) for launch in launches]
            reports = [await _reported(one, lambda report: report["ready"]) for one in pending]
            for launch, report in zip(launches, reports, strict=True):
                run = lab.folder_of(launch, config)
                assert await asyncio.to_thread(_fetch, report["port"]) == run.run_id
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", fixed), 3).close()
            look = lab.folder_of(launches[0], config, task=1)
            (look.work / "targets.new").write_text("".join(f"{host} {port}\n" for host, port in targets))
            (look.work / "targets.new").rename(look.work / "targets")
            await until_async(look.exit)
            said = look.output.read_text().splitlines()
            assert said[0] == "127.0.0.1 reached" and said[-1] == "['lo', 'tap0']", said
            assert not any("reached" in line for line in said[1:3]), said
            # By routes; with an agent that runs as root, by the rules of the task's cgroup before that.
            refused = {line.partition(" ")[2] for line in said[3:6]}
            assert refused <= {"Permission denied", "Operation not permitted"}, said
            assert address is None or said[6] == f"{address} reached", said
            for launch in launches:
                await lab.stop(launch, config.machine, 1.0)
            for one in pending:
                await one.result(NodeOutcome)
    await until_async(lambda: not [pid for pid in processes_of(lab.folder) if "slirp" in _command(pid)])
    assert not list(Path("/sys/fs/cgroup").rglob(f"mizzen-{launches[0].workload_id}*"))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_network_of_its_own_needs_a_sandbox(lab: Lab, config: AgentConfig) -> None:
    """The errors name both settings."""
    with pytest.raises(ValueError, match="interface eth0: needs network host"):
        AgentConfig.model_validate(config.model_dump() | {"interface": "eth0"})
    with pytest.raises(ValueError, match="network ports: needs isolation sandbox"):
        lab.config(isolation=Isolation.NONE, network=TaskNetwork.PORTS)
