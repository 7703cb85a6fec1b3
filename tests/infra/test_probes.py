"""Readiness probes of the embedded stack, over real sockets."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from api import connections
from infra.stack.ports import free_port
from infra.stack.probes import http


class _Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Returns 503 for `/readyz`, what a full API sends for `/full`, and 200 for every other path."""
        if self.path == "/full":
            self.wfile.write(connections._REFUSAL)
            self.close_connection = True
            return
        self.send_response(503 if self.path == "/readyz" else 200)
        self.end_headers()
        self.wfile.write(b"not ready")

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def api() -> Iterator[str]:
    """Yields the URL of a running server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def test_no_proxy_is_asked_for_what_is_on_this_machine(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes ignore a proxy in the environment, because it cannot reach a loopback address."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await http(f"{api}/healthz").ask()


async def test_an_api_with_too_many_connections_works(api: str) -> None:
    """A user of the machine who opens many connections cannot have the API restarted."""
    assert await http(f"{api}/full").ask()


async def test_what_does_not_serve_is_not_ready(api: str) -> None:
    """A server is not ready if it returns an error, does not listen, or does not respond within the limit."""
    assert not await http(f"{api}/readyz").ask()
    assert not await http(f"http://127.0.0.1:{free_port()}/healthz").ask()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not await http(f"http://127.0.0.1:{silent.getsockname()[1]}/healthz", 0.2).ask()
