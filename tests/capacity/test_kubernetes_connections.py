"""Connections to an API server are closed when nobody uses them any more, and not before."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.api import KubernetesApi
from capacity.providers.kubernetes.settings import ClusterAccess


class _Server(ThreadingHTTPServer):
    """Answers requests with an empty list once `may_answer` is set; with 401 if `refuses`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked, self.may_answer, self.refuses = threading.Event(), threading.Event(), False
        self.ended = threading.Semaphore(0)
        """Is released for each connection that the client has closed."""

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        super().finish_request(request, client_address)
        self.ended.release()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self.server.asked.set()
        self.server.may_answer.wait()
        status, body = 200, {"kind": "PodList", "items": [], "metadata": {"resourceVersion": "1"}}
        if self.server.refuses:
            status, body = 401, {"kind": "Status", "message": "Unauthorized"}
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def api(server: _Server, tmp_path: Path) -> KubernetesApi:
    (path := tmp_path / "kubeconfig").write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "c",
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    return KubernetesApi("k8s", ClusterAccess(kubeconfig=path, timeout_s=60), "pods")


def test_closing_lets_a_request_of_another_thread_end(server: _Server, api: KubernetesApi) -> None:
    """As of the thread that watches: its answer arrives, then the connection ends, and there is no new one."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(api.objects, "pods")
        assert server.asked.wait(60)
        api.close()
        assert not server.ended.acquire(timeout=0.2)
        server.may_answer.set()
        assert found.result(60) == ([], "1")
    assert server.ended.acquire(timeout=60)
    with pytest.raises(ProviderUnavailable, match="k8s: it was closed"):
        api.objects("pods")


def test_refused_credentials_close_the_connection(server: _Server, api: KubernetesApi) -> None:
    """The next request reads the credentials again, on a new connection."""
    server.may_answer.set()
    server.refuses = True
    with pytest.raises(ProviderUnavailable, match="401"):
        api.objects("pods")
    assert server.ended.acquire(timeout=60)
    server.refuses = False
    assert api.objects("pods") == ([], "1")
    api.close()
    assert server.ended.acquire(timeout=60)
