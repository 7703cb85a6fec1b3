"""The surroundings of a balancer in the tests: an API on loopback, replicas in processes, and the balancer itself."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from infra.stack.ports import free_port

CHECKOUT = Path(__file__).parents[2]
NAME = "chat"


def wait_for(what: str, is_so: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Returns the first true value of `is_so`. A connection that is refused counts as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.TransportError, OSError):
            if value := is_so():
                return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    api: "Api"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/v1/events":
            return self._events(parse_qs(parts.query)["after"][0])
        _, _, kind, name, _ = parts.path.split("/")
        assert kind == "services"
        api = self.server.api
        with api.lock:
            api.fetches += 1
            body = api.lists.get(name)
        if api.fails:
            return self._send(500, {"title": "broken"})
        return self._send(200, body) if body else self._send(404, {"title": "no such service"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = self.path.split("/")[3]
        with self.server.api.lock:
            for one in body["seconds"]:
                self.server.api.counts[name, body["balancer"], one["second"]] = one
        self._send(200, {})

    def _send(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _events(self, after: str) -> None:
        """Streams events in the wire format of `api.streams.events`."""
        api = self.server.api
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"retry: 1000\n\n")
        with api.lock:
            position = len(api.events) if after == "now" else int(after.split("-")[1])
        while not api.closing.is_set():
            with api.changed:
                if len(api.events) == position:
                    api.changed.wait(1.0)
                found = api.events[position:]
            frames = b": still here\n\n" if not found else b""
            for event in found:
                position += 1
                text = json.dumps({"id": f"1-{position}", "tenant": None, **event})
                frames += f"id: 1-{position}\nevent: {event['kind']}\ndata: {text}\n\n".encode()
            try:
                self.wfile.write(frames)
            except OSError:
                return


class Api:
    """An API with lists of replicas, the event stream and counts. It can be stopped and started."""

    def __init__(self) -> None:
        self.port = free_port()
        self.lists: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.counts: dict[tuple[str, str, int], dict[str, Any]] = {}
        """The last counts by service, balancer and second."""
        self.fetches = 0
        self.fails = False
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closing = threading.Event()
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.closing.clear()
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.api = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def set(self, endpoints: list[dict[str, Any]], name: str = NAME, *, event: bool = True, **settings: Any) -> None:
        """Replaces the list of a service."""
        with self.changed:
            version = self.lists.get(name, {"version": 0})["version"] + 1
            usual = {
                "service": name, "name": name, "policy": "round_robin", "retry_non_idempotent": False,
                "request_timeout_s": 30, "max_queue": 100, "drain_s": 30,
            }  # fmt: skip
            self.lists[name] = {**usual, **settings, "version": version, "endpoints": endpoints}
            if event:
                self.events.append({"kind": "service.endpoints", "detail": {"service": name}})
                self.changed.notify_all()

    def total(self, field: str, name: str = NAME) -> int:
        """Returns the sum of a field of all counts."""
        with self.lock:
            return sum(one[field] for (service, _, _), one in self.counts.items() if service == name)


class Replica:
    """A replica in a process of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Starts the process, also again after it has ended."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.balance.replica", str(self.port)], cwd=CHECKOUT, stdout=subprocess.PIPE
        )
        with self._process.stdout as output:  # type: ignore[union-attr]
            assert output.readline() == b"ready\n"

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
            "kind": "spot", "state": "ready",
        }  # fmt: skip
        return {**usual, **fields}


class Balancer:
    """`mizzen balance` in a process of its own."""

    def __init__(self, api: Api, data: Path, *options: str, services: Mapping[str, int] | None = None) -> None:
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

    def haproxy(self) -> int:
        """Returns the process id of HAProxy; 0: it does not run."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return next((int(pid) for pid in path.read_text().split()), 0)

    def stored(self) -> Any:
        """Returns the list on the disk."""
        return json.loads((self.data / NAME / "endpoints.json").read_text())

    def servers(self) -> set[str]:
        """Returns the ports of HAProxy's servers, as its own runtime socket lists them."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.path.relpath(self.data / NAME / "haproxy.sock"))
            client.sendall(b"show servers state\n")
            rows = b"".join(iter(lambda: client.recv(65536), b"")).decode().splitlines()[2:]
        return {row.split()[18] for row in rows if row}

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
