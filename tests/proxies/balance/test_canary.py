"""A canary gets its share of the requests, its answers are counted, and what is in progress survives its end."""

from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from bench.balance_api import NAME, BalanceApi
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]
_CANARY = {"version": 2, "share": 0.2, "slow_s": 0.05}


def _begin(api: BalanceApi, start: Start, replicas: list[Replica], **settings: object) -> Balancer:
    old, new = replicas
    api.set([old.entry(), new.entry(is_canary=True)], canary=_CANARY, **settings)
    balancer = start()
    balancer.wait_replicas(set(replicas))
    return balancer


def _served(balancer: Balancer, requests: int) -> Counter[str]:
    """Returns how many requests each replica has answered, by its port."""
    with httpx.Client(base_url=balancer.url) as client:
        answers = [client.post("/", content=b"x") for _ in range(requests)]
        return Counter(one.headers.get("x-replica", "none") for one in answers)


def _counted(api: BalanceApi, field: str) -> int:
    with api.lock:
        return sum(one["canary"][field] for one in api.counts.values() if one["canary"] is not None)


@pytest.mark.rotating
@pytest.mark.parametrize("policy", ["least_connections", "round_robin"])
def test_a_canary_gets_its_share(api: BalanceApi, start: Start, replicas: list[Replica], policy: str) -> None:
    """One request after another, so that the load of the replicas says nothing; then the canary ends."""
    old, new = replicas
    balancer = _begin(api, start, replicas, policy=policy)
    served = _served(balancer, 1000)
    assert 130 <= served[str(new.port)] <= 270  # 5 standard deviations around 200
    api.set([old.entry(), new.entry()], policy=policy)
    wait_for("half of the requests", lambda: 15 <= _served(balancer, 40)[str(new.port)] <= 25)
    api.set([old.entry()], policy=policy)
    balancer.wait_replicas({old})


def test_the_answers_of_a_canary_are_counted(api: BalanceApi, start: Start, replicas: list[Replica]) -> None:
    """Failures also if another try has answered the request; slow answers are those above the limit."""
    _, new = replicas
    balancer = _begin(api, start, replicas)
    with httpx.Client(base_url=balancer.url) as client:
        slow = sum(client.get("/?after_s=0.1").headers["x-replica"] == str(new.port) for _ in range(20))
        new.behave(status="500 Broken")
        statuses = [client.post("/").status_code for _ in range(10)]
    wait_for("slow answers", lambda: _counted(api, "slow") == slow)
    wait_for("failed answers", lambda: _counted(api, "failed") == statuses.count(500))
    assert _counted(api, "answered") >= slow
    wait_for("the others' answers", lambda: _counted(api, "others_answered") >= 20 - slow)
    assert _counted(api, "others_failed") == 0
    assert {one["canary"]["version"] for one in api.counts.values() if one["canary"] is not None} == {2}


def test_a_repeated_request_is_a_failure_of_the_canary(api: BalanceApi, start: Start, replicas: list[Replica]) -> None:
    """Each try counts, so that repetitions hide no bad version."""
    old, new = replicas
    api.set([old.entry(), new.entry(is_canary=True)], canary={**_CANARY, "share": 1})
    balancer = start()
    balancer.wait_replicas({new})
    new.behave(status="500 Broken")
    assert httpx.get(balancer.url).status_code == 500
    wait_for("four tries", lambda: _counted(api, "failed") == 4)


def test_a_canary_serves_all_requests_if_no_other_replica_is_up(
    api: BalanceApi, start: Start, replicas: list[Replica]
) -> None:
    """Also if requests are not held."""
    old, new = replicas
    balancer = _begin(api, start, replicas, hold_s=0)
    old.kill()
    wait_for("the canary alone", lambda: set(_served(balancer, 20)) == {str(new.port)})


@pytest.mark.rotating
def test_a_stream_outlives_the_end_of_a_canary(api: BalanceApi, start: Start, replicas: list[Replica]) -> None:
    """A replica whose version has passed continues, so its requests are not closed after `drain_s`."""
    old, new = replicas
    balancer = _begin(api, start, replicas, drain_s=0.5)
    api.set([new.entry(is_canary=True)], canary=_CANARY, drain_s=0.5)
    balancer.wait_replicas({new})
    api.set([old.entry(), new.entry(is_canary=True)], canary={**_CANARY, "share": 1}, drain_s=0.5)
    balancer.wait_replicas({new})
    with httpx.stream("GET", f"{balancer.url}/events?count=40&every_s=0.1") as answer:
        assert answer.headers["x-replica"] == str(new.port)
        api.set([old.entry(), new.entry()], drain_s=0.5)
        assert sum(chunk.count(b"data") for chunk in answer.iter_raw()) == 40
    assert api.lists[NAME]["canary"] is None
