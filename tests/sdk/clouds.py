"""Fake metadata servers on loopback: of AWS, GCP and Azure as documented, and servers that misbehave."""

import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from infra.stack.ports import free_port


class Cloud(ABC):
    """A fake metadata server. It records its requests in `asked` and its address in `base`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.base = ""

    @abstractmethod
    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        """Returns the status, headers and text of the response to a request. Header names are in lower case."""


class Aws(Cloud):
    """AWS's metadata server (IMDSv2): it answers 401 to a request without a valid token."""

    def __init__(self) -> None:
        super().__init__()
        self.action: str | None = None
        self.rebalance: str | None = None
        self.instance = "i-0abcd1234efgh5678".replace("efgh", "0000")
        self.tokens: list[str] = []
        self.valid: set[str] = set()
        self.grants = True

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        if path == "/latest/api/token":
            ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600 or "x-forwarded-for" in headers:
                return 400, {}, ""
            token = f"AQAEAK{len(self.tokens)}=="
            self.tokens.append(token)
            if self.grants:
                self.valid.add(token)
            return 200, {"X-aws-ec2-metadata-token-ttl-seconds": ttl}, token
        if headers.get("x-aws-ec2-metadata-token") not in self.valid:
            return 401, {}, ""
        found = {
            "/latest/meta-data/instance-id": self.instance,
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(path)
        return (404, {}, "") if method != "GET" or found is None else (200, {}, found)


class Gcp(Cloud):
    """Google's metadata server: each request must have the Metadata-Flavor header, and each response has it."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"id": "4520031799277581759", "preempted": "FALSE", "scheduling/preemptible": "FALSE"}
        self.strange: str | None = None
        """End of a path that gets a 404 response without Google's headers; None: no such path."""

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        ours = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        if headers.get("metadata-flavor") != "Google":
            return 403, ours, "Missing Metadata-Flavor:Google header."
        if self.strange is not None and path.endswith(self.strange):
            return 404, {}, ""
        found = self.values.get(path.removeprefix("/computeMetadata/v1/instance/"))
        return (404, ours, "") if method != "GET" or found is None else (200, ours, found)


class Azure(Cloud):
    """Azure's metadata server: each request must have the Metadata header and an API version."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "trainer_3"
        self.events: list[Any] = []
        self.started: list[Any] = []

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        url = urlsplit(path)
        if headers.get("metadata") != "true" or "api-version" not in parse_qs(url.query):
            return 400, {}, json.dumps({"error": "Bad request"})
        if url.path == "/metadata/instance/compute":
            vm = {
                "azEnvironment": "AzurePublicCloud",
                "name": self.name,
                "vmId": "02aab8a4-74ef-476e-8182-f6d2ba4166a6",
            }
            return 200, {"Content-Type": "application/json"}, json.dumps(vm)
        if url.path == "/metadata/scheduledevents":
            if method == "POST":
                self.started.append(json.loads(body))
                return 200, {}, ""
            text = json.dumps({"DocumentIncarnation": 1, "Events": self.events})
            return 200, {"Content-Type": "application/json; charset=utf-8"}, text
        return 404, {}, ""

    def evict(self, resources: list[str], not_before: str, status: str = "Scheduled", **more: str) -> None:
        """Schedules an eviction event in the documented format."""
        event = {
            "EventId": f"event-{len(self.events)}", "EventStatus": status, "EventType": "Preempt",
            "ResourceType": "VirtualMachine", "Resources": resources, "NotBefore": not_before, "Description": "",
            "EventSource": "Platform", "DurationInSeconds": -1,
        }  # fmt: skip
        self.events.append({**event, **more})


class Fixed(Cloud):
    """A server that gives the same response to every request."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__()
        self.status, self.text = status, text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], str]:
        return self.status, self.headers, self.text


@contextmanager
def serving(cloud: Cloud) -> Iterator[str]:
    """Serves `cloud` on a free loopback port; yields the base address."""

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            cloud.asked.append((self.command, self.path))
            given = {name.lower(): value for name, value in self.headers.items()}
            status, headers, text = cloud.answer(self.command, self.path, given, body)
            data = text.encode()
            self.send_response_only(status)
            for name, value in {"Content-Type": "text/plain", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do

        def log_message(self, format: str, *arguments: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    cloud.base = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield cloud.base
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Talk = Callable[[socket.socket, threading.Event], None]


@contextmanager
def talking(talk: Talk) -> Iterator[tuple[str, threading.Event]]:
    """Serves connections with `talk` after reading each request; yields the address and the event that ends `talk`."""
    freed = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            talk(connection, freed)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=one, args=(connection,)))
                threads[-1].start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", freed
    finally:
        freed.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for thread in threads:
            thread.join()


def silent(connection: socket.socket, freed: threading.Event) -> None:
    """Sends no response."""
    freed.wait()


def dripping(connection: socket.socket, freed: threading.Event) -> None:
    """Sends an endless header, one byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not freed.wait(0.02):
        connection.sendall(b"x")


def says(data: bytes) -> Talk:
    """Returns a `Talk` that sends `data` and closes the connection."""

    def talk(connection: socket.socket, freed: threading.Event) -> None:
        connection.sendall(data)

    return talk


@contextmanager
def blackhole() -> Iterator[str]:
    """Yields an address at which connection attempts hang, because the listener's backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        place = listener.getsockname()
        waiting = []
        try:
            for _ in range(4):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                with suppress(BlockingIOError):
                    waiting[-1].connect(place)
            yield f"http://127.0.0.1:{place[1]}"
        finally:
            for each in waiting:
                each.close()


def refusing() -> str:
    """Returns an address on which no server listens."""
    return f"http://127.0.0.1:{free_port()}"
