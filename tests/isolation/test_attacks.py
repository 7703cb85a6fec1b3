"""A tenant's task attacks the installation and another tenant's task; each attack fails."""

import ast
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.isolation import TENANT_UIDS, why_not
from domain.isolation import Isolation
from infra.files import write_private
from infra.stack.ports import free_port
from tests.agent.harness import has_scopes
from tests.containers import DockerHere, dockerd, registry
from tests.isolation import attack
from tests.stack.harness import ROOT, BareUp, Up, processes_of, wait_until

FLEET = """
version: 1
regions:
  - name: west
    clusters:
      - {name: c, machines: [{name: m, gpus: 2, gpu_type: a100, cpus: 2, memory: 2GiB}]}
"""
_LISTENS = "0A"
_SECRET_STEP = 424_242
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run tasks as other users, or a stack as one")
POSSIBLE = {
    "sandbox": set(),
    # Without cgroups, which the test's user may not create.
    "sandbox of an ordinary user": {"port_of_another_tenant", "fork_bomb", "memory"},
    # Containers have no scope of Landlock: dockerd starts them.
    "container": {"abstract_socket"},
    "user": {
        "abstract_socket", "processes", "shared_memory", "temporary_files", "privileges",
        "namespaces", "kernel_interfaces", "shared_memory_without_limit",
    },
}  # fmt: skip
"""What succeeds in each mode. `docs/trust.md` names it, with what else could stop it."""
MAY_BE_POSSIBLE = {"container": {"kernel_interfaces": {"vsock", "io_uring"}}}
"""What older engines do not stop: AF_VSOCK and io_uring are in the seccomp profiles of newer ones."""


class Engine(NamedTuple):
    """A container engine, a registry on loopback, and an image in it."""

    docker: DockerHere
    host: str
    image: str


_LONG = [pytest.param(mode, marks=pytest.mark.long) for mode in ("sandbox of an ordinary user", "container")]


@pytest.fixture(scope="module", params=["sandbox", "user", *_LONG])
def mode(request: pytest.FixtureRequest) -> str:
    """The mode of isolation of the stack."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine | None]:
    """A container engine and an image in a registry, in which the tasks use the machine's programs."""
    if mode != "container":
        yield None
        return
    with dockerd() as docker, registry(tmp_path_factory.mktemp("registry")) as host:
        docker.load(image := f"{host}/bare:1", bare=True)
        docker.docker("push", image)
        docker.docker("rmi", image)
        yield Engine(docker, host, image)


@pytest.fixture(scope="module")
def stack(mode: str, engine: Engine | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack with two tenants, which it separates."""
    folder = tmp_path_factory.mktemp("attacked")
    tasks: dict[str, Any] = {"isolation": mode.partition(" ")[0]}
    if engine is not None:
        paths = dict.fromkeys(str(Path(path).resolve()) for path in ("/usr", ROOT, sys.base_prefix))
        tasks = {
            "isolation": "sandbox", "container_engine": str(engine.docker.socket), "paths": list(paths),
            "registries": [f"http://{engine.host}"],
        }  # fmt: skip
    if (why := why_not(Isolation(tasks["isolation"]), folder, TENANT_UIDS[0])) is not None:
        pytest.skip(why)
    up = (BareUp if mode == "sandbox of an ordinary user" else Up)(folder, FLEET)
    config = up.folder / "config.yaml"
    kept = [line for line in config.read_text().splitlines() if not line.startswith(("tasks:", "trust_tenants:"))]
    config.write_text("\n".join([*kept, f"tasks: {json.dumps(tasks)}"]) + "\n")
    try:
        up.start()
        for tenant in ("victim", "intruder"):
            up.client().set_tenant(tenant, 3, {"a100": 1}, None)
        yield up
    finally:
        up.close()


def _submit(up: Up, tenant: str, run: str, image: str | None) -> str:
    job = {"name": "main", "tasks": 1, "resources": {"cpus": 0.5, "memory": "512MiB"}, "run": run}
    if image is not None:  # It has no Python of its own.
        job |= {"image": image, "run": run.replace("$MIZZEN_PYTHON", sys.executable)}
    document = {"version": 1, "name": tenant, "tenant": tenant, "jobs": [job], "limits": {"retries": 0}}
    return str(up.client().submit(document)["id"])


def _pid_of(up: Up, workload: str) -> int:
    """Returns the pid of the victim, once it is ready."""
    for pid, command in processes_of(up.data).items():
        if "victim.py" in command and f"MIZZEN_WORKLOAD={workload}".encode() in _environ(pid):
            assert Path(f"/proc/{pid}/cwd/ready").exists()
            return pid
    raise AssertionError("the task does not run yet")


def _environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _ports(up: Up) -> list[int]:
    """Returns the TCP ports on which the processes of a stack listen, in the network of the machine."""
    inodes = set()
    for pid in processes_of(up.data):
        with contextlib.suppress(OSError):
            inodes |= {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    out = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for fields in (line.split() for line in Path(file).read_text().splitlines()[1:]):
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
                out.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(out)


def _script(name: str, targets: str = "") -> str:
    text = (ROOT / "tests" / "isolation" / name).read_text()
    return f"cat > targets.json <<'END'\n{targets}\nEND\ncat > {name} <<'END'\n{text}END\n"


def test_attacks_fail(stack: Up, mode: str, engine: Engine | None) -> None:
    """The attacks run as a task of one tenant, beside a running task of another tenant on the same machine."""
    port, name, key = free_port(), f"victim-{os.getpid()}", os.getpid()
    serves = f'exec "$MIZZEN_PYTHON" victim.py {name} {port} {key}'
    image = None if engine is None else engine.image
    victim = _submit(stack, "victim", _script("victim.py") + serves, image)
    pid = wait_until(lambda: _pid_of(stack, victim), "the victim runs")
    told = {name.decode(): value.decode() for name, _, value in (one.partition(b"=") for one in _environ(pid))}
    targets = {
        "data_dir": str(stack.data),
        "api": stack.client().url,
        "ports": _ports(stack),
        "victim": pid,
        "victim_workload": victim,
        "victim_folder": str(Path(f"/proc/{pid}/cwd").readlink().parent),
        "victim_checkpoint": told["MIZZEN_CHECKPOINT_URI"].removeprefix("file://"),
        "victim_port": port,
        "shm": name,
        "sysv": key,
        "report": str(stack.data / "report.json"),
    }
    write_private(stack.data / "report.json", json.dumps({"step": _SECRET_STEP}))
    run = _script("attack.py", json.dumps(targets)) + '"$MIZZEN_PYTHON" attack.py targets.json'
    intruder = _submit(stack, "intruder", run, image)
    wait_until(lambda: stack.ended(intruder), "the attacks have ended")
    said = list(stack.client().logs(intruder, follow=True))
    possible = POSSIBLE[mode] | (set() if has_scopes() else {"abstract_socket"})
    lines = [json.loads(line) for line in said if line.startswith(b"{")]
    assert [line["attack"] for line in lines] == [one.__name__ for one in attack.ATTACKS], said
    got = {line["attack"]: line["got"] for line in lines if "got" in line}
    maybe = MAY_BE_POSSIBLE.get(mode, {})
    assert got.keys() - maybe.keys() == possible, lines
    for name, parts in maybe.items():
        assert set(ast.literal_eval(got.get(name, "[]"))) <= parts, lines
    assert stack.phase(victim) == "running"
    assert len(targets["ports"]) >= 2, "the API and the gateway"
    assert str(_SECRET_STEP) not in json.dumps(stack.client().workload(intruder))
