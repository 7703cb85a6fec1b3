"""Replicas that fail or hang although their probe succeeds: who gets the requests, and what clients see."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.balance_api import BalanceApi
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]
_PAUSE_S = 0.04


@pytest.fixture
def three(replicas: list[Replica]) -> Iterator[list[Replica]]:
    """Three replicas."""
    third = Replica(2)
    yield [*replicas, third]
    third.kill()


def _begin(api: BalanceApi, start: Start, three: list[Replica], **settings: object) -> Balancer:
    api.set([one.entry() for one in three], policy="least_connections", **settings)
    balancer = start()
    balancer.wait_replicas(set(three))
    return balancer


def _statuses(balancer: Balancer, method: str, count: int, clients: int = 4, pause_s: float = 0.0) -> list[int]:
    """Returns the statuses of requests that several clients send one after another; 0: no answer within 10 s.

    `pause_s`: each client waits before each of its requests.
    """

    def ask(_: int) -> int:
        time.sleep(pause_s)
        try:
            return client.request(method, "/", content=b"x").status_code
        except httpx.TransportError:
            return 0

    with httpx.Client(base_url=balancer.url, timeout=10) as client, ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, range(count)))


@pytest.mark.rotating
def test_a_replica_that_answers_errors_gets_no_requests(api: BalanceApi, three: list[Replica], start: Start) -> None:
    """Of 600 requests with a body few fail, although the broken replica is always the least busy one.

    When it works again, it is tried and admitted. The clients pause, because a broken replica answers at once: without
    pauses, the number of failures would be the speed of the clients times the time until the balancer gets the CPU.
    """
    balancer = _begin(api, start, three)
    three[1].behave(status="500 Broken")
    failed = sum(status != 200 for status in _statuses(balancer, "POST", 600, pause_s=_PAUSE_S))
    print(f"failed: {failed} of 600")
    assert 3 <= failed <= 30
    said = "replica 1 is ejected for 10 s: the last "
    assert said in balancer.log.read_text()
    three[1].behave()

    def is_admitted() -> bool:
        _statuses(balancer, "POST", 20)
        return "replica 1 is admitted again" in balancer.log.read_text()

    wait_for("the replica is admitted", is_admitted)
    balancer.wait_replicas(set(three))


def test_requests_that_may_be_repeated_do_not_fail(api: BalanceApi, three: list[Replica], start: Start) -> None:
    """A GET that got 500 is sent to another replica. A 500 of all replicas reaches the client, and none is ejected."""
    balancer = _begin(api, start, three)
    three[0].behave(status="500 Broken")
    assert set(_statuses(balancer, "GET", 200)) == {200}
    for one in three:
        one.behave(status="503 Busy")
    assert set(_statuses(balancer, "GET", 60)) == {503}
    assert "replica 1 is ejected" not in balancer.log.read_text()


@pytest.mark.rotating
@pytest.mark.parametrize("limit_s", [1.0, None])
def test_a_hung_replica_is_found_by_the_first_byte(
    api: BalanceApi, three: list[Replica], start: Start, limit_s: float | None
) -> None:
    """It is found within seconds, although the request timeout is 30 s; with a limit its requests are repeated."""
    balancer = _begin(api, start, three, first_byte_s=limit_s)
    three[2].behave(hang="1")
    began_s = time.monotonic()
    statuses = _statuses(balancer, "GET", 100) if limit_s is not None else _statuses(balancer, "POST", 100)
    print(f"{statuses.count(0)} of 100 without an answer, in {time.monotonic() - began_s:.1f} s")
    if limit_s is not None:
        assert set(statuses) == {200}
    else:
        assert statuses.count(200) >= 94
    said = "replica 2 is ejected for 10 s: a request has waited "
    wait_for("it is ejected", lambda: said in balancer.log.read_text())
    assert set(_statuses(balancer, "POST", 30)) == {200}


@pytest.mark.rotating
def test_a_hung_request_that_must_not_be_repeated_fails_at_the_limit(
    api: BalanceApi, three: list[Replica], start: Start
) -> None:
    """Its client gets an error instead of waiting for the request timeout. A stream that has begun is not touched."""
    balancer = _begin(api, start, three, first_byte_s=1)
    with httpx.stream("GET", f"{balancer.url}/events?count=40&every_s=0.1") as answer:
        streaming = next(one for one in three if str(one.port) == answer.headers["x-replica"])
        streaming.behave(hang="1")
        statuses = _statuses(balancer, "POST", 24, clients=8)  # So many that the streaming replica gets some of them.
        assert 1 <= sum(status != 200 for status in statuses) <= 8
        assert set(statuses) <= {200, 502, 503, 0}
        assert sum(chunk.count(b"data") for chunk in answer.iter_raw()) == 40
