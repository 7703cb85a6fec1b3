"""The surroundings of a balancer in the tests: an API on loopback, replicas in processes, and the balancer itself."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from bench.balance_api import NAME, BalanceApi
from infra.stack.ports import free_port
from proxies.balance.configuration import PLUG

CHECKOUT = Path(__file__).parents[3]


def wait_for(what: str, is_so: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Returns the first true value of `is_so`. A connection that is refused counts as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError, OSError):
            if value := is_so():
                return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


class Replica:
    """A replica in a process of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Starts the process, also again after it has ended."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.proxies.balance.replica", str(self.port)],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
        )
        with self._process.stdout as output:  # type: ignore[union-attr]
            assert output.readline() == b"ready\n"

    def behave(self, **options: str) -> None:
        """Lets the replica answer all requests with these options, such as `status="500 Broken"` or `hang="1"`."""
        httpx.get(f"http://127.0.0.1:{self.port}/behave", params=options)

    @property
    def held(self) -> int:
        """The number of requests of `/hold` that it has not answered."""
        return int(httpx.get(f"http://127.0.0.1:{self.port}/holding", timeout=30).text)

    def release(self) -> None:
        """Lets it answer all requests of `/hold`."""
        httpx.get(f"http://127.0.0.1:{self.port}/release", timeout=30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, at the latest a moment after it closed its connections."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.3)
        return self._process.returncode is not None

    def assert_running(self) -> None:
        assert not self.has_ended

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def entry(self, **fields: Any) -> dict[str, Any]:
        """Returns the replica's entry of a list."""
        usual = {
            "replica": self.number, "address": "127.0.0.1", "port": self.port, "region": "east", "zone": "a",
            "gpu_type": "a100", "kind": "spot", "state": "ready", "is_canary": False,
        }  # fmt: skip
        return {**usual, **fields}


class Balancer:
    """`mizzen balance` in a process of its own."""

    def __init__(self, api: BalanceApi, data: Path, *options: str, services: Mapping[str, int] | None = None) -> None:
        self.port = free_port()
        self.data = data
        services = services or {NAME: self.port}
        offers = [text for name, port in services.items() for text in ("--service", f"{name}=127.0.0.1:{port}")]
        self._base = [sys.executable, "-m", "server", "balance", "--data", str(data)]
        self._command = [*self._base, *offers, *options]
        self._environment = {**os.environ, "MIZZEN_API": api.url, "MIZZEN_API_KEY": "", "PYTHONWARNINGS": "default"}
        self.log = data.parent / "balancer.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, cwd=CHECKOUT, env=self._environment, stdout=log, stderr=log)

    def run_with(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Runs the command with other options to its end."""
        return subprocess.run(
            [*self._base, *options], cwd=CHECKOUT, env=self._environment, capture_output=True, text=True
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def haproxies(self) -> set[int]:
        """Returns the process ids of the HAProxy processes."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {int(pid) for pid in path.read_text().split()}

    def haproxy(self) -> int:
        """Returns the process id of the only HAProxy; 0: it does not run."""
        return next(iter(self.haproxies()), 0)

    def haproxy_of(self, service: str) -> int:
        """Returns the process id of the HAProxy of a service."""
        folder = self.data / service
        return next(pid for pid in self.haproxies() if Path(f"/proc/{pid}/cwd").resolve() == folder.resolve())

    def stored(self) -> Any:
        """Returns the list on the disk."""
        return json.loads((self.data / NAME / "endpoints.json").read_text())

    def ask(self, command: str) -> str:
        """Returns HAProxy's answer to a command on its runtime socket."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.path.relpath(self.data / NAME / "haproxy.sock"))
            client.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: client.recv(65536), b"")).decode()

    def servers(self) -> set[str]:
        """Returns the ports of HAProxy's servers, without the one that makes requests wait."""
        rows = [row.split() for row in self.ask("show servers state").splitlines()[2:] if row]
        return {row[18] for row in rows if row[3] != PLUG}

    def wait_replicas(self, replicas: set[Replica], url: str | None = None) -> None:
        """Waits until requests reach exactly these replicas, as often as there are replicas and once more."""
        wanted = {str(replica.port) for replica in replicas}
        with httpx.Client() as client:

            def found() -> bool:
                got = {client.get(url or self.url).headers.get("x-replica") for _ in range(2 * len(wanted) + 1)}
                return got == wanted

            wait_for(f"requests reach the ports {wanted}", found)


@contextlib.contextmanager
def running(balancer: Balancer) -> Iterator[Balancer]:
    """Starts a balancer, and kills it at the end."""
    balancer.start()
    try:
        yield balancer
    finally:
        assert balancer.process is not None
        if balancer.process.poll() is None:
            balancer.stop(signal.SIGKILL)
