"""Connections of tasks: between tenants on one machine, and to metadata services."""

import errno
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import connect_rules
from agent.cgroups import make_cgroup, remove_cgroup
from infra.stack.ports import free_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can load eBPF programs")
CONNECT = """
import os, socket, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
kind, host, port = sys.argv[2:5]
family = socket.AF_INET6 if ":" in host else socket.AF_INET
try:
    if kind == "MPTCP":
        client = socket.socket(family, socket.SOCK_STREAM, 262)
    else:
        client = socket.socket(family, socket.SOCK_DGRAM if kind == "DGRAM" else socket.SOCK_STREAM)
    client.settimeout(1.0)
    if kind == "DGRAM":
        client.sendto(b"x", (host, int(port)))
    elif kind == "FASTOPEN":
        client.sendto(b"x", socket.MSG_FASTOPEN, (host, int(port)))
        client.recv(1)
    else:
        client.connect((host, int(port)))
    print("ok")
except OSError as error:
    print(error.errno or "timeout")
"""
SERVE = """
import socket, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
print(server.getsockname()[1], flush=True)
while True:
    server.accept()[0].close()
"""


class Cgroups:
    """Cgroups of tasks with the rules of their tenants."""

    def __init__(self) -> None:
        self._made: list[str] = []

    def of(self, tenant_number: int, *, metadata: bool = True, **ports: Any) -> str:
        """Returns the path of a new cgroup. `ports`: `reserved` and `own`."""
        path = make_cgroup(f"rules-{uuid.uuid4().hex}")
        if path is None:
            pytest.skip("this machine has no cgroup v2")
        self._made.append(path)
        try:
            connect_rules.attach(path, tenant_number, metadata=metadata, **ports)
        except OSError as error:
            pytest.skip(f"this kernel has no eBPF programs of cgroups: {error}")
        return path

    def remove(self) -> None:
        """Removes all."""
        for path in self._made:
            remove_cgroup(path)


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    """Yields new cgroups, and removes them."""
    made = Cgroups()
    yield made
    made.remove()


def _connect(cgroup: str, host: str, port: int, kind: str = "STREAM") -> str:
    argv = [sys.executable, "-I", "-S", "-c", CONNECT, cgroup, kind, host, str(port)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_tasks_of_other_tenants_are_kept_out(cgroups: Cgroups, host: str) -> None:
    """A tenant's own tasks and processes of the machine connect; another tenant's tasks get no answer."""
    argv = [sys.executable, "-I", "-S", "-c", SERVE, cgroups.of(5)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            socket.create_connection((host, port), 5.0).close()
            assert _connect(cgroups.of(5), host, port) == "ok"
            assert [_connect(cgroups.of(6), host, port, kind) for kind in ("STREAM", "MPTCP")] == ["timeout"] * 2
        finally:
            server.kill()


@pytest.mark.parametrize("host", ["169.254.169.254", "::ffff:169.254.169.254", "169.254.170.2", "fd00:ec2::254"])
@pytest.mark.parametrize("kind", ["STREAM", "DGRAM", "FASTOPEN", "MPTCP"])
def test_metadata_services_are_refused(cgroups: Cgroups, host: str, kind: str) -> None:
    """With the rule, calls fail at once as not permitted; DNS at the same address, and all without the rule, do not."""
    refused = str(errno.EPERM)
    assert _connect(cgroups.of(5, metadata=False), host, 80, kind) == refused
    assert _connect(cgroups.of(5, metadata=False), host, 53, kind) != refused
    if kind == "DGRAM":
        assert _connect(cgroups.of(5), host, 80, kind) != refused


def test_other_addresses_are_allowed(cgroups: Cgroups) -> None:
    """An address is compared as a whole: one whose last byte differs from a metadata service's is allowed."""
    cgroup = cgroups.of(5, metadata=False)
    for host in ("169.254.169.253", "::1", "fd00:ec2::255", "127.0.0.1"):
        assert _connect(cgroup, host, 9, "DGRAM") != str(errno.EPERM)
    assert Path(cgroup).exists()


BIND = """
import socket, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::")):
    for protocol in (0, 262):
        for port in sys.argv[2:]:
            try:
                with socket.socket(family, socket.SOCK_STREAM, protocol) as server:
                    server.bind((host, int(port)))
                    server.listen()
                    print(port if int(port) else 0)
            except OSError as error:
                protocol and error.errno in (92, 93) or print(port, error.strerror)
"""


def test_reserved_ports_are_for_their_attempts(cgroups: Cgroups) -> None:
    """A task listens on any port outside the agent's range, and inside on its own ones only."""
    said = ["Address already in use"]
    while any("Address already in use" in line for line in said):  # By another process, meanwhile.
        first = free_port()
        if not all(_is_free(port) for port in range(first - 1, first + 4)):
            continue
        cgroup = cgroups.of(5, reserved=(first, first + 2), own=[first + 1])
        argv = [sys.executable, "-I", "-S", "-c", BIND, cgroup, *map(str, (0, *range(first - 1, first + 4)))]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    refused = [f"{port} Operation not permitted" for port in (first, first + 2)]
    one = ["0", str(first - 1), refused[0], str(first + 1), refused[1], str(first + 3)]
    assert said == one * (len(said) // len(one)) and len(said) >= 3 * len(one), said


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
