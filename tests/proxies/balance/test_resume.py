"""Streams that another replica continues: the example's server and client behind a real balancer."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from bench.balance_api import BalanceApi
from tests.proxies.balance.world import CHECKOUT, Balancer, Replica, wait_for

Start = Callable[..., Balancer]
EXAMPLE = CHECKOUT / "examples" / "serving"


class _Server(Replica):
    """The example's server as a replica."""

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(EXAMPLE / "server.py")],
            env={**os.environ, "MIZZEN_PORT": str(self.port)},
            stdout=subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{self.port}/health"
        wait_for("the server answers", lambda: httpx.get(url).status_code == 200)


@pytest.fixture
def servers() -> Iterator[list[_Server]]:
    """Three replicas."""
    started = [_Server(number) for number in range(3)]
    yield started
    for one in started:
        one.kill()


def _client() -> Any:
    spec = importlib.util.spec_from_file_location("example_stream", EXAMPLE / "stream.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.rotating
def test_a_stream_survives_its_replicas(api: BalanceApi, servers: list[_Server], start: Start) -> None:
    """Two of three replicas and HAProxy are killed during a stream; the client gets every event once."""
    api.set([one.entry() for one in servers], resume=True, policy="least_connections")
    balancer = start()
    url = f"{balancer.url}/generate?tokens=60&seed=7"
    wait_for("it answers", lambda: httpx.get(url).status_code == 200)
    whole = [line[6:] for line in httpx.get(url).text.splitlines() if line.startswith("data: ")][:-1]
    assert len(whole) == 60

    def streaming() -> _Server:
        """Returns the replica with a request in progress."""

        def busy() -> list[str]:
            rows = [row.split(",") for row in balancer.ask("show stat -1 4 -1").splitlines() if "least_conn" in row]
            return [row[1] for row in rows if row[4] == "1"]

        (name,) = wait_for("a replica streams", busy)
        return servers[int(name.partition("-")[0])]

    found = []
    for letter in _client().events(f"{url}&pause_ms=60"):
        found.append(letter)
        if len(found) in (10, 25):
            streaming().kill()
        elif len(found) == 40:
            os.kill(balancer.haproxy(), signal.SIGKILL)
    assert found == whole
    wait_for("the cuts are reported", lambda: api.total("cut") == 2)


def test_a_resumed_request_is_repeated_whatever_its_method(
    api: BalanceApi, replicas: list[Replica], start: Start
) -> None:
    """A replica dies before its first byte: a POST with `Last-Event-ID` is sent to another one, without it it fails."""
    api.set([one.entry() for one in replicas], resume=True)
    balancer = start()
    balancer.wait_replicas(set(replicas))
    dying, other = replicas
    path = f"{balancer.url}/die-after?port={dying.port}"
    for _ in range(2):
        answer = httpx.post(path, content=b"x" * 100, headers={"Last-Event-ID": "4"})
        assert (answer.status_code, answer.headers["x-replica"]) == (200, str(other.port))
        assert answer.headers["mizzen-replica"] == str(other.number)
    assert dying.has_ended
    dying.start()
    balancer.wait_replicas(set(replicas))
    with httpx.Client() as client:
        statuses = []
        for _ in range(2):
            try:
                statuses.append(client.post(path, content=b"x" * 100).status_code)
            except httpx.RemoteProtocolError:
                statuses.append(0)
    assert dying.has_ended and sorted(statuses)[0] in (0, 200) and set(statuses) != {200}
    api.set([other.entry()], resume=False)
    wait_for("HAProxy has the setting", lambda: "mizzen-replica" not in httpx.get(balancer.url).headers)
