"""A tenant's task attacks the installation and another tenant's task; each attack fails."""

import ast
import contextlib
import json
import os
import socket
import stat
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest

from infra.files import write_private
from infra.stack.ports import free_port
from mizzen_client.port_forward import forward_ports
from mizzen_client.remote_command import SessionClosed
from server.agents import _FIRST_PORT, _PORTS_EACH
from tests.agent.harness import has_scopes
from tests.isolation import attack
from tests.isolation.conftest import PATIENCE_S, Engine, submit
from tests.isolation.outside import LINKS, followed, gained, owners
from tests.stack.harness import ROOT, Up, processes_of, wait_until

_LISTENS = "0A"
_SECRET_STEP = 424_242
_FILES = ("root/.", "cwd/.", "exe", "mem", "maps", "environ", "fd")
"""The files of a process in `/proc` that attacks open."""
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run tasks as other users, or a stack as one"),
    pytest.mark.timeout(1200),
]
POSSIBLE = {
    # The network and the cgroup hierarchy are those of the machine.
    "sandbox": {"cgroups_of_others", "sockets_of_others"},
    # Without cgroups, which the test's user may not create, and without eBPF programs.
    "sandbox of an ordinary user": {
        "port_of_another_tenant", "ports_of_later_tasks", "memory", "metadata_service", "sockets_of_others",
    },
    # Containers have no scope of Landlock: dockerd starts them.
    "container": {"abstract_socket", "sockets_of_others"},
    "none of an ordinary user": {
        "temporal_by_socket", "keys_and_settings", "listing_of_the_data_folder", "environment_of_a_process", "signals",
        "ptrace", "folder_of_another_tenant", "checkpoints_of_another_tenant", "processes", "shared_memory",
        "temporary_files", "port_of_another_tenant", "ports_of_later_tasks", "abstract_socket",
        "tables_logs_and_launches", "change_the_system",
        "privileges", "namespaces", "its_supervisors", "fork_bomb", "memory", "memory_and_files_of_others",
        "message_queues", "metadata_service", "hard_links", "output_of_its_own", "sockets_of_others", "watches",
        "others_by_number",
    },
    "user": {
        "abstract_socket", "processes", "shared_memory", "temporary_files", "privileges",
        "namespaces", "kernel_interfaces", "calls_by_other_numbers", "message_queues", "cgroups_of_others",
        "sockets_of_others",
    },
}  # fmt: skip
"""What succeeds in each mode. `docs/trust.md` names it, with what else could stop it."""
MAY_BE_POSSIBLE: dict[str, dict[str, set[str] | None]] = {
    "container": {
        "kernel_interfaces": {"vsock", "io_uring"},
        # The engine's init has the user and the files of the task.
        "its_supervisors": {f"{name}: {file}" for name in ("first", "shim") for file in _FILES},
        "memory_and_files_of_others": None,
        "socket_families": {"family 40 type 1", "family 40 type 5"},
        "events_of_the_kernel": {"processes"},
    },
    "sandbox of an ordinary user": {"homes": None},
    "none of an ordinary user": dict.fromkeys(
        (
            "homes",
            "memory_of_the_kernel",
            "shared_memory_without_limit",
            "kernel_interfaces",
            "calls_by_other_numbers",
            "socket_families",
            "events_of_the_kernel",
            "drivers",
        )
    ),
    "user": dict.fromkeys(
        (
            "homes",
            "memory_of_the_kernel",
            "shared_memory_without_limit",
            "socket_families",
            "events_of_the_kernel",
            "drivers",
        )
    ),
}
"""What depends on the machine: older engines do not stop AF_VSOCK and io_uring; to tasks as users, modes of homes and
settings of the kernel apply. None: any part of it."""


_LONG = [
    pytest.param(mode, marks=pytest.mark.long)
    for mode in ("user", "sandbox of an ordinary user", "none of an ordinary user", "container")
]


@pytest.fixture(scope="module", params=["sandbox", *_LONG])
def mode(request: pytest.FixtureRequest) -> str:
    """The mode of isolation of the stack."""
    return str(request.param)


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


def _stored(up: Up, workload: str) -> dict[str, int]:
    """Returns names and modes of what is stored of the outputs of an attack, which have links to secrets."""
    found = dict[str, int]()
    for part in (path for path in up.data.glob(f"buckets/*/outputs/{workload}/parts/**/*") if path.is_file()):
        with tarfile.open(part) as tar:
            found |= {member.name: member.mode for member in tar}
    return found


def _forwarded(up: Up, image: str | None, ports: list[int]) -> list[bytes]:
    """Returns what is said at the first port of a task of the intruder, which listens there, and at other ports."""
    serves = f'exec "$MIZZEN_PYTHON" victim.py forwards-{os.getpid()} {ports[0]} {os.getpid() + 1}'
    relay = submit(up, "intruder", _script("victim.py") + serves, image)
    wait_until(lambda: _pid_of(up, relay), "the relay runs", PATIENCE_S)
    client, places = up.client(), Queue[int]()
    session = client.request_session(relay, "forward")
    said = []
    with ThreadPoolExecutor(1) as pool:
        pairs = [(port, 0) for port in ports]
        forwarding = pool.submit(forward_ports, client, session, pairs, on_listening=lambda _, at: places.put(at))
        for _ in ports:
            with socket.create_connection(("127.0.0.1", places.get(timeout=PATIENCE_S))) as connection:
                said.append(b"")
                with contextlib.suppress(ConnectionError):
                    said[-1] = connection.recv(100)
        client.cancel(relay)
        assert isinstance(forwarding.exception(PATIENCE_S), SessionClosed)
    return said


def test_attacks_fail(stack: Up, mode: str, engine: Engine | None) -> None:
    """The attacks run as a task of one tenant, beside a running task of another tenant on the same machine."""
    port, name, key = free_port(), f"victim-{os.getpid()}", os.getpid()
    serves = f'exec "$MIZZEN_PYTHON" victim.py {name} {port} {key}'
    image = None if engine is None else engine.image
    victim = submit(stack, "victim", _script("victim.py") + serves, image)
    pid = wait_until(lambda: _pid_of(stack, victim), "the victim runs", PATIENCE_S)
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
        "range": [_FIRST_PORT, _FIRST_PORT + _PORTS_EACH],
        "key": stack.client().create_key("submitter", "intruder")["key"],
        "report": str(stack.data / "report.json"),
        # Without isolation it succeeds, and the attempt is then lost.
        "left_out": ["files_that_the_agent_writes"] if mode.startswith("none") else [],
    }
    write_private(stack.data / "report.json", json.dumps({"step": _SECRET_STEP}))
    files = ("attack.py", "attack_kernel.py", "attack_more.py", "attack_results.py")
    scripts = [_script(name, json.dumps(targets)) for name in files]
    run = "".join(["mkdir -p tests/isolation\n", *scripts, f"mv {' '.join(files)} tests/isolation\n"])
    run += '"$MIZZEN_PYTHON" -m tests.isolation.attack targets.json'
    intruder = submit(stack, "intruder", run, image, outputs={"stolen": "stolen", "left": "left"})
    wait_until(lambda: stack.ended(intruder), "the attacks have ended", PATIENCE_S)
    owned = owners(stack.data)
    linking = submit(stack, "intruder", LINKS.replace("DATA", str(stack.data)), image, limits={"retries": 1})
    wait_until(lambda: stack.ended(linking), "the task with links was started again", PATIENCE_S)
    said = list(stack.client().logs(intruder, follow=True))
    possible = POSSIBLE[mode] | (set() if has_scopes() else {"abstract_socket"})
    lines = [json.loads(line) for line in said if line.startswith(b"{")]
    names = [one.__name__ for one in attack.ATTACKS if one.__name__ not in targets["left_out"]]
    assert [line["attack"] for line in lines] == names, said
    got = {line["attack"]: line["got"] for line in lines if "got" in line}
    maybe = MAY_BE_POSSIBLE.get(mode, {})
    assert got.keys() - maybe.keys() == possible, "\n".join(f"{name}: {what}" for name, what in got.items())
    for name, parts in maybe.items():
        assert parts is None or set(ast.literal_eval(got.get(name, "[]"))) <= parts, lines
    own, other = _forwarded(stack, image, [free_port(), port])
    assert own == b"secret" and (other == b"secret") == ("port_of_another_tenant" in possible)
    assert stack.phase(victim) == "running"
    assert len(targets["ports"]) >= 2, "the API and the gateway"
    assert str(_SECRET_STEP) not in json.dumps(stack.client().workload(intruder))
    assert stack.phase(linking) == "succeeded"
    assert owners(stack.data) == owned, "an agent gives a task its checkpoints, and nothing to which they lead"
    assert followed(stack.data, linking) == []
    assert gained(stack.data, "closed") == set(), "checkpoints belong to one user"
    # A tenant may open its folders: others of the machine then get its user, and never that of mizzen.
    assert not gained(stack.data, "opened") & {0, stack.data.stat().st_uid}
    stored = _stored(stack, intruder)
    assert stored.keys() <= {"folder", "opened"}, "the folder may have been away at that moment"
    assert not any(stat.S_IMODE(each) & 0o7000 for each in stored.values()), stored
