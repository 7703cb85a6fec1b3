"""Services whose machines are taken: without notice, under load, in a short form of `make serve-demo`; with notice."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mizzen_client.client import Client
from mizzen_client.views import Endpoint
from rigs.demos.serving.installation import Balancer, installation
from rigs.demos.serving.scenario import ON_DEMAND, SPOT, ServingDemoScenario, document
from tests.stack.harness import wait_until

_SECONDS, _PER_S, _TARGET = 24.0, 40.0, 2
_MOST_FAILED = 3
"""The bound of the full form, one request in a thousand, would be less than one request here."""


@pytest.mark.long
def test_a_service_goes_on_through_kills(tmp_path: Path) -> None:
    """Hardly any request fails while a zone, a replica, the worker, Temporal and the balancer are killed."""
    with installation(tmp_path) as site:
        course = ServingDemoScenario(site, _SECONDS, _PER_S, _TARGET, print).run()
    found = course.outcome
    assert found is not None
    assert found.requests == _SECONDS * _PER_S
    assert len(found.failed) <= _MOST_FAILED, found.failed
    assert found.cut + found.open_in_killed <= 0.05 * found.requests
    assert course.availability(ON_DEMAND) > 0.9
    assert course.availability(SPOT) > 0.5
    assert course.usd(SPOT) > 0
    assert course.usd(ON_DEMAND) > 0


@pytest.mark.long
def test_streams_end_by_themselves_within_a_notice(tmp_path: Path) -> None:
    """A spot machine is reclaimed with notice: its replica gets no new requests, and its streams continue to their end.

    No other request fails, and another replica takes its place.
    """
    with installation(tmp_path, notice_s=25) as site:
        client = site.up.client()
        client.set_tenant("t", 3, {"a100": 20}, None)
        body = document(SPOT, 1, "spothedge")
        body["service"]["drain_seconds"] = 20
        client.create_service(body)
        balancer = Balancer(site.folder, client.url, (site.up.data / "operator.key").read_text().strip(), (SPOT,))
        balancer.start()
        try:
            wait_until(lambda: client.service(SPOT)["live"] == 2 == _ready(client), "two spot replicas are ready")
            with httpx.Client(base_url=f"http://127.0.0.1:{balancer.ports[SPOT]}", trust_env=False, timeout=30) as http:
                wait_until(lambda: len(_pids(http)) == 2, "both replicas get requests")
                streams = [_Stream(http.base_url, 80) for _ in range(6)]
                own = [stream.pid for stream in streams]
                assert set(own) == _pids(http), "both replicas have streams"
                for one in client.endpoints(SPOT)["endpoints"]:
                    if _pid_of(one) == own[0]:
                        assert site.take_zone(str(one["zone"])) == 1
                wait_until(lambda: own[0] not in _pids(http), "the replica gets no new requests")
                assert not any(stream.has_ended.is_set() for stream in streams)
                while not all(stream.has_ended.wait(0.05) for stream in streams):
                    assert own[0] not in _pids(http)
                assert [stream.events for stream in streams] == [81] * 6  # The last event says that all are there.
            wait_until(
                lambda: any(one["cause"] == "preempted" for one in client.service_replicas(SPOT)),
                "the replica has ended",
            )
            wait_until(lambda: _ready(client) >= 2, "another replica is ready")
        finally:
            balancer.close()


def _ready(client: Client) -> int:
    return sum(client.service(SPOT)["ready"].values())


def _pids(http: httpx.Client) -> set[str]:
    """Returns the replicas that answer eight requests."""
    answers = [http.get("/generate", params={"tokens": 0}) for _ in range(8)]
    assert all(answer.status_code == 200 for answer in answers)
    return {answer.headers["x-replica"] for answer in answers}


def _pid_of(endpoint: Endpoint) -> str:
    url = f"http://{endpoint['address']}:{endpoint['port']}/generate"
    return str(httpx.get(url, params={"tokens": 0}, trust_env=False).headers["x-replica"])


class _Stream:
    """A stream of the example's server, which a thread reads to its end."""

    def __init__(self, url: httpx.URL, tokens: int) -> None:
        self.has_ended = threading.Event()
        self.events = 0
        self._answer = self._read(url, tokens)
        self.pid = next(self._answer)
        threading.Thread(target=lambda: list(self._answer), daemon=True).start()

    def _read(self, url: httpx.URL, tokens: int) -> Iterator[str]:
        try:
            with httpx.stream(
                "GET", url.join("/generate"), params={"tokens": tokens, "pause_ms": 100}, trust_env=False, timeout=30
            ) as answer:
                yield answer.headers["x-replica"]
                for line in answer.iter_lines():
                    self.events += line.startswith("data: ")
        finally:
            self.has_ended.set()
