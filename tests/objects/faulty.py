"""A loopback proxy between a store's client and its server, which can change, truncate or replace responses."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Answer:
    """A response of the server, which a fault can change before it is forwarded."""

    method: str
    path: str
    asked: dict[str, str]
    """Headers of the request; the names are in lower case."""
    status: int
    headers: dict[str, str]
    body: bytes
    sent_bytes: int | None = None
    """The connection is closed after this many bytes of the body; None: the whole body is sent."""

    @property
    def is_content(self) -> bool:
        """Whether the body is the content of an object below `a/`, or a range of it."""
        path, _, query = unquote(self.path).partition("?")
        is_google = "/storage/v1/" in path and "alt=media" not in query
        return self.method == "GET" and self.status in (200, 206) and "/a/" in path and not is_google


@dataclass
class Proxy:
    """A running proxy: its address, the fault that it applies to each response, and the recorded requests."""

    url: str
    fault: Callable[[Answer], object] = lambda _: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and requested range of each request; without a range it is an empty text."""


@contextmanager
def proxy(server_url: str) -> Iterator[Proxy]:
    """Runs a proxy to `server_url`."""
    host = urlsplit(server_url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body, dict(self.headers))
            said = connection.getresponse()
            headers = {name.lower(): value for name, value in said.getheaders()}
            asked = {name.lower(): value for name, value in self.headers.items()}
            answer = Answer(self.command, self.path, asked, said.status, headers, said.read())
            connection.close()
            found.requests.append((self.command, asked.get("range", "")))
            found.fault(answer)
            self.send_response_only(answer.status)
            for name in ("connection", "transfer-encoding"):
                answer.headers.pop(name, None)
            if self.command != "HEAD":
                answer.headers["content-length"] = str(len(answer.body))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: answer.sent_bytes])
            self.close_connection = answer.sent_bytes is not None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = _forward

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Proxy(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
