"""Network namespaces for benchmarks: each belongs to a process and disappears with it, so nothing is left behind.

`lab` moves a benchmark into a namespace of its own. `LabNode` is a process in another namespace, connected to the first
by a veth pair. A node runs `python -m bench.network_lab MODULE`, reads a request from each line (JSON: name of a
function of the module, and its named arguments) and writes each response.
"""

import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.harness import InvalidBenchmark

SUBNET = "10.231.8"
_NEW_NETWORK = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def lab() -> Iterator[None]:
    """Moves this thread into a new network namespace for the duration of the block.

    Raises:
        InvalidBenchmark: this process is not root.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _libc.unshare(_NEW_NETWORK) != 0:
            raise InvalidBenchmark("network namespaces need root: run the benchmark as root")
        try:
            ip("link", "set", "lo", "up")
            yield
        finally:
            _libc.setns(before, _NEW_NETWORK)
    finally:
        os.close(before)


def ip(*arguments: str) -> None:
    """Runs `ip`; raises `CalledProcessError` if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class LabNode:
    """A process in a network namespace of its own, whose `eth0` is connected to the interface `port` of the lab."""

    def __init__(self, number: int, module: str, niceness: int = 0) -> None:
        """Starts the node, with the address `SUBNET.number`."""
        self.address = f"{SUBNET}.{number}"
        self.port = f"port{number}"
        command = ["nice", "-n", str(niceness), "unshare", "--net", sys.executable, "-m", "bench.network_lab", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # The namespace exists.
        # Segments as they are on a wire: without segmentation offload each packet has its own headers.
        peer = ("peer", "name", "eth0", "netns", str(self._process.pid))
        ip("link", "add", self.port, "gso_max_segs", "1", "type", "veth", *peer)
        ip("link", "set", self.port, "up")
        self("configure", address=self.address)

    def __call__(self, name: str, **named: Any) -> Any:
        """Executes a request and returns its result; raises `InvalidBenchmark` if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, named]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        response = json.loads(line) if line else {"error": "the process of the node has ended"}
        if "error" in response:
            raise InvalidBenchmark(f"node {self.address}: {response['error']}")
        return response["value"]

    def close(self) -> None:
        """Ends the process and with it the namespace."""
        with self._process as process:
            process.kill()


@contextmanager
def nodes(count: int, module: str, niceness: int = 0) -> Iterator[list[LabNode]]:
    """Starts `count` nodes with the numbers from 2 on; must run in `lab`."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            made.append(LabNode(2 + number, module, niceness))
            stack.callback(made[-1].close)
        yield made


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls all functions at the same time, each in a thread, and returns their results in order."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _configure(address: str) -> None:
    ip("link", "set", "lo", "up")
    ip("link", "set", "eth0", "gso_max_segs", "1", "up")
    ip("addr", "add", f"{address}/24", "dev", "eth0")


def _serve(module: str) -> None:
    functions = importlib.import_module(module)
    print(json.dumps({"value": None}), flush=True)
    for line in sys.stdin:
        name, named = json.loads(line)
        try:
            function = _configure if name == "configure" else getattr(functions, name)
            response = {"value": function(**named)}
        except Exception as error:
            response = {"error": f"{name}: {type(error).__name__}: {error}"}
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
