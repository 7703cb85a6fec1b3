"""An API on loopback with the routes that `mizzen balance` uses: lists of replicas, the event stream and counts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from infra.stack.ports import free_port

NAME = "chat"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    api: "BalanceApi"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:
        """Answers with events, or with the list or the certificate of a service."""
        parts = urlsplit(self.path)
        if parts.path == "/v1/events":
            return self._events(parse_qs(parts.query)["after"][0])
        _, _, kind, name, what = parts.path.split("/")
        assert kind == "services"
        api = self.server.api
        with api.lock:
            api.fetches += 1
            body = api.lists.get(name)
            if what == "certificate" and body:
                body = {"name": body["certificate"], "pem": api.certificates[body["certificate"]]}
        if api.fails:
            return self._send(500, {"title": "broken"})
        return self._send(200, body) if body else self._send(404, {"title": "no such service"})

    def do_POST(self) -> None:
        """Stores counts."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = self.path.split("/")[3]
        if self.server.api.refuses is not None:
            self.server.api.refusals += 1
            detail = self.server.api.refuses.format(second=body["seconds"][0]["second"])
            return self._send(422, {"title": "Invalid request", "detail": detail})
        with self.server.api.lock:
            self.server.api.now[name] = body["now"]
            for one in body["seconds"]:
                self.server.api.counts[name, body["balancer"], one["second"]] = one
        return self._send(200, {})

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
        closing = api.closing
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"retry: 1000\n\n")
        with api.lock:
            position = len(api.events) if after == "now" else int(after.split("-")[1])
        while not closing.is_set():
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


class BalanceApi:
    """An API with lists of replicas, the event stream and counts. It can be stopped and started."""

    def __init__(self) -> None:
        self.port = free_port()
        self.lists: dict[str, dict[str, Any]] = {}
        self.certificates: dict[str, str] = {}
        """The PEM text of each certificate."""
        self.events: list[dict[str, Any]] = []
        self.counts: dict[tuple[str, str, int], dict[str, Any]] = {}
        """The last counts by service, balancer and second."""
        self.now: dict[str, Any] = {}
        """What a balancer of each service last said that it does."""
        self.fetches = 0
        self.fails = False
        self.refuses: str | None = None
        """Why counts are refused; `{second}` is replaced with their first second. None: they are stored."""
        self.refusals = 0
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.closing = threading.Event()
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        """The URL of the API."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts serving, also again after a stop."""
        self.closing = threading.Event()  # A new event: streams from before the stop end.
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.api = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Stops serving, and ends the event streams."""
        if self._server is not None:
            with self.changed:
                self.closing.set()
                self.changed.notify_all()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def set(self, endpoints: list[dict[str, Any]], name: str = NAME, *, event: bool = True, **settings: Any) -> None:
        """Replaces the list of a service."""
        with self.changed:
            version = self.lists.get(name, {"version": 0})["version"] + 1
            usual = {
                "service": f"sv-{name}", "name": name, "policy": "round_robin", "sticky_header": None,
                "sticky_prefix_bytes": None, "resume": False, "retry_non_idempotent": False,
                "request_timeout_s": 30, "first_byte_s": None, "max_queue": 100, "hold_s": 0, "drain_s": 30,
                "certificate": None, "canary": None,
            }  # fmt: skip
            self.lists[name] = {**usual, **settings, "version": version, "endpoints": endpoints}
            if event:
                self.events.append({"kind": "service.endpoints", "detail": {"service": f"sv-{name}", "name": name}})
                self.changed.notify_all()

    def total(self, field: str, name: str = NAME) -> int:
        """Returns the sum of a field of all counts."""
        with self.lock:
            return sum(one[field] for (service, _, _), one in self.counts.items() if service == name)
