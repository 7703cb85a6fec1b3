"""Two machines in network namespaces on one bridge; the test's own thread works inside the first one."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.network.edge import Edge
from tests.netns import namespaces
from tests.netns.namespaces import Network

PORTS = range(7000, 7010)
_NEW_NETWORK = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Moves this thread into a network namespace for the duration of the block."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _set_namespace(inside)
        try:
            yield
        finally:
            _set_namespace(before)
    finally:
        os.close(inside)
        os.close(before)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _NEW_NETWORK) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@pytest.fixture(scope="session")
def enforceable() -> None:
    """Skips tests that need root, namespaces or eBPF where the host has none."""
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    network = Network(["a"])
    try:
        with entered(network.namespace("a")):
            Edge("eth0", ()).close()
    except OSError as error:
        pytest.skip(f"eBPF programs cannot be attached to a network interface here: {error}")
    finally:
        network.remove()


@pytest.fixture
def network(enforceable: None) -> Iterator[Network]:
    """The namespaces; this thread is in `a`."""
    made = Network(["a", "b"])
    try:
        with entered(made.namespace("a")):
            yield made
    finally:
        made.remove()


def state(interface: str = "eth0") -> str:
    """Returns everything that the kernel reports about the interface, its queues and its programs, without counters."""
    commands = (["ip", "-j", "-d", "link", "show", interface], ["tc", "-j", "qdisc", "show", "dev", interface])
    filters = (["tc", "filter", "show", "dev", interface, side] for side in ("ingress", "egress"))
    return "".join(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in (*commands, *filters)
    )


def other(network: Network, code: str, *arguments: str) -> str:
    """Runs Python code in namespace `b` and returns what it prints."""
    command = [*network.enter("b"), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


ROOT = Path(__file__).parents[2]
SINK_PORT = 9000


@contextmanager
def sink(network: Network) -> Iterator[str]:
    """Reads everything that arrives in namespace `b`, and acknowledges the end of each connection."""
    code = """
import socket, threading
def read(connection):
    with connection:
        while connection.recv(1 << 16): pass
        connection.sendall(b"+")
with socket.create_server(("", 9000)) as listener:
    print("ready", flush=True)
    while True: threading.Thread(target=read, args=(listener.accept()[0],), daemon=True).start()
"""
    with subprocess.Popen([*network.enter("b"), sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield network.address("b")
        finally:
            process.kill()
