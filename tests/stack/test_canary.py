"""A service on a whole stack, with a real balancer: updates that begin as a canary."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rigs.demos.serving.installation import Balancer
from tests.stack.harness import Up, wait_until

_FLEET = """
version: 1
regions:
  - name: west
    clusters:
      - name: a
        machines: [{name: m, count: 1, cpus: 8, memory: 8GiB}]
"""
_SERVER = """
import http.server, itertools, os
asked = itertools.count(1)

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        every = int(os.environ["FAILS_EVERY"])
        self.answer(500 if every and next(asked) % every == 0 else 200)

    def answer(self, status):
        self.send_response(status)
        self.send_header("X-Version", os.environ["VERSION"])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("", int(os.environ["MIZZEN_PORT"])), Handler).serve_forever()
"""
_SHARE = 0.3


def _document(version: int, fails_every: int = 0) -> dict[str, Any]:
    return {
        "version": 1, "name": "chat", "tenant": "t",
        "service": {
            "replicas": 2, "readiness_probe": {"path": "/", "interval_seconds": 0.5}, "drain_seconds": 2,
            "update": {"canary": "30%", "for": "10s", "abort_if": {"error_rate": "1%", "p90_ms": 2000}},
        },
        "resources": {"cpus": 0.5, "memory": "128MiB"},
        "env": {"VERSION": str(version), "FAILS_EVERY": str(fails_every)},
        "files": {"server.py": _SERVER},
        "run": 'exec "$MIZZEN_PYTHON" server.py',
    }  # fmt: skip


class _Load:
    """Requests of three clients, with the version that answered each and its status."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[str, int]] = []
        self._url = url
        self._ending = threading.Event()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10, trust_env=False) as client:
            while not self._ending.is_set():
                try:
                    answer = client.post("/", content=b"x")
                    self.answers.append((answer.headers.get("x-version", "none"), answer.status_code))
                except httpx.TransportError:
                    self.answers.append(("none", 0))
                time.sleep(0.03)

    @contextmanager
    def running(self) -> Iterator["_Load"]:
        """Sends requests until the end of the block."""
        clients = [threading.Thread(target=self._ask) for _ in range(3)]
        for one in clients:
            one.start()
        try:
            yield self
        finally:
            self._ending.set()
            for one in clients:
                one.join()

    def since(self, first: int) -> Counter[tuple[str, int]]:
        """Returns how many answers each version gave with each status, from an answer on."""
        return Counter(itertools.islice(self.answers, first, None))


@pytest.mark.long
def test_a_bad_version_goes_back_and_a_good_one_replaces_the_old_one(tmp_path: Path) -> None:
    """Version 2 fails every tenth request, and is taken back without an operator. Version 3 is good."""
    up = Up(tmp_path, _FLEET, settings="services: {scaling_interval_s: 1}\n")
    balancer: Balancer | None = None
    try:
        up.start()
        client = up.client()
        client.set_tenant("t", 3, {}, None)
        client.create_service(_document(1))
        key = (up.data / "operator.key").read_text().strip()
        balancer = Balancer(tmp_path, client.url, key, ("chat",))
        balancer.start()
        wait_until(lambda: client.service("chat")["versions"] == {"1": 2}, "version 1 serves")
        url = f"http://127.0.0.1:{balancer.ports['chat']}"
        wait_until(lambda: httpx.get(url, trust_env=False).status_code == 200, "the balancer answers")

        def notes() -> dict[str, str]:
            return {one["code"]: one["sentence"] for one in client.service("chat")["notes"]}

        def ready() -> dict[str, int]:
            return dict(client.service("chat")["versions"])

        with _Load(url).running() as load:
            client.update_service("chat", _document(2, fails_every=10))
            wait_until(lambda: "canary_runs" in notes(), "the canary gets requests")
            assert ready() == {"1": 2, "2": 1}
            first = len(load.answers)
            found = wait_until(lambda: notes().get("canary_failed"), "the canary fails")
            print(found)  # The balancer may find it first, because these failures also stand out among the replicas.
            assert "answers failed, more than 1 %; of the older version's, 0 of " in found or "have ejected" in found
            wait_until(lambda: client.service("chat")["live"] == 2, "its replica has ended")
            assert ready() == {"1": 2}
            counted = load.since(first)
            print(counted)
            assert set(counted) <= {("1", 200), ("2", 200), ("2", 500)}
            assert counted["2", 500] <= _SHARE * sum(counted.values())
            second = len(load.answers)
            client.update_service("chat", _document(3))
            wait_until(lambda: ready() == {"3": 2}, "version 3 serves")
            wait_until(lambda: client.service("chat")["live"] == 2, "version 1 has ended")
            assert {status for _, status in load.since(second)} == {200}
            assert notes() == {}
        kinds = [one["kind"] for one in client.events() if one["kind"].startswith("service.canary")]
        assert kinds == [f"service.canary_{what}" for what in ("began", "failed", "began", "passed")]
    finally:
        if balancer is not None:
            balancer.close()
        up.close()
