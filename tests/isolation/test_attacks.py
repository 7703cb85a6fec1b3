"""A tenant's task attacks the installation and another tenant's task; each attack fails."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.isolation import attack
from tests.stack.harness import ROOT, Up, processes_of, wait_until

FLEET = """
version: 1
regions:
  - name: west
    clusters:
      - {name: c, machines: [{name: m, gpus: 2, gpu_type: a100, cpus: 2, memory: 2GiB}]}
"""
# Like the defaults: users are separate.
SETTINGS = "tasks: {separate_tenants: true, private_tmp: true}\n"
_LISTENS = "0A"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run tasks as other users")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack with two tenants, which it separates."""
    up = Up(tmp_path_factory.mktemp("attacked"), FLEET)
    config = up.folder / "config.yaml"
    kept = [line for line in config.read_text().splitlines() if not line.startswith(("tasks:", "trust_tenants:"))]
    config.write_text("\n".join(kept) + "\n" + SETTINGS)
    try:
        up.start()
        for tenant in ("victim", "intruder"):
            up.client().set_tenant(tenant, 3, {"a100": 1}, None)
        yield up
    finally:
        up.close()


def _submit(up: Up, tenant: str, run: str) -> str:
    job = {"name": "main", "tasks": 1, "resources": {"cpus": 0.5, "memory": "512MiB"}, "run": run}
    document = {"version": 1, "name": tenant, "tenant": tenant, "jobs": [job], "limits": {"retries": 0}}
    return str(up.client().submit(document)["id"])


def _pid_of(up: Up, workload: str) -> int:
    """Returns the pid of the `sleep` of a workload's task."""
    for pid, command in processes_of(up.data).items():
        if command.startswith("sleep") and f"MIZZEN_WORKLOAD={workload}".encode() in _environ(pid):
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


def test_every_attack_fails(stack: Up) -> None:
    """The attacks run as a task of one tenant, beside a running task of another tenant on the same machine."""
    save = 'mkdir -p "$(echo "$MIZZEN_CHECKPOINT_URI" | sed s,^file://,,)"; echo mine > private.txt; exec sleep 600'
    victim = _submit(stack, "victim", save)
    pid = wait_until(lambda: _pid_of(stack, victim), "the victim runs")
    told = {name.decode(): value.decode() for name, _, value in (one.partition(b"=") for one in _environ(pid))}
    targets = {
        "data_dir": str(stack.data),
        "api": stack.client().url,
        "ports": _ports(stack),
        "victim": pid,
        "victim_folder": str(Path(f"/proc/{pid}/cwd").readlink().parent),
        "victim_checkpoint": told["MIZZEN_CHECKPOINT_URI"].removeprefix("file://"),
    }
    script = (ROOT / "tests" / "isolation" / "attack.py").read_text()
    run = f"cat > targets.json <<'END'\n{json.dumps(targets)}\nEND\ncat > attack.py <<'END'\n{script}END\n"
    intruder = _submit(stack, "intruder", run + '"$MIZZEN_PYTHON" attack.py targets.json')
    wait_until(lambda: stack.ended(intruder), "the attacks have ended")
    said = list(stack.client().logs(intruder, follow=True))
    lines = [json.loads(line) for line in said if line.startswith(b"{")]
    assert [line["attack"] for line in lines] == [one.__name__ for one in attack.ATTACKS], said
    assert [line for line in lines if "got" in line] == []
    assert stack.phase(victim) == "running"
    assert len(targets["ports"]) >= 2, "the API and the gateway"
