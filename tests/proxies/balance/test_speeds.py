"""Shares of the requests by the speed of replicas: in a model of their queues, and with a real HAProxy."""

import itertools
import threading
from collections.abc import Callable

import httpx
import pytest

from bench.balance_api import BalanceApi
from proxies.balance.outliers import ServerCounts
from proxies.balance.speeds import LEAST_SHARE, Speeds
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]


class _Model:
    """Clients that always have `clients` requests in progress, distributed by weight over two kinds of replicas.

    A replica answers at most `most` requests a second, each in at least `least_s` seconds.
    """

    def __init__(self, clients: float, most: dict[str, float], least_s: dict[str, float]) -> None:
        self.clients, self.most, self.least_s = clients, most, least_s
        self.speeds = Speeds()
        self.shares = dict.fromkeys(most, 100)
        self._answered = dict.fromkeys(most, 0.0)
        self._now_s = 0.0

    def rates(self) -> dict[str, float]:
        """Returns the answers a second of each replica."""
        total = sum(self.shares.values())
        active = {name: self.clients * share / total for name, share in self.shares.items()}
        return {name: min(self.most[name], count / self.least_s[name]) for name, count in active.items()}

    def run(self, seconds: int) -> list[dict[str, int]]:
        """Returns the shares after each second."""
        seen = []
        for _ in range(seconds):
            total = sum(self.shares.values())
            for name, rate in self.rates().items():
                self._answered[name] += rate
            counts = {
                name: ServerCounts(int(self._answered[name]), 0, round(self.clients * self.shares[name] / total))
                for name in self.most
            }
            self._now_s += 1
            self.shares = self.speeds.observe({name: name[:-1] for name in self.most}, counts, self._now_s)
            seen.append(self.shares)
        return seen


@pytest.mark.parametrize("times", [1.5, 2, 3])
def test_busy_replicas_get_what_they_can_answer(times: float) -> None:
    """A kind that answers so many times as many requests gets about so many times as many, and shares settle."""
    most = {"a1": 10 * times, "a2": 10 * times, "b1": 10, "b2": 10}
    model = _Model(60, most, dict.fromkeys(most, 0.1))
    model.run(400)
    last = model.run(200)
    for shares in last:
        assert shares["a1"] == shares["a2"] == 100 and shares["b1"] == shares["b2"]
        assert 0.8 / times <= shares["b1"] / 100 <= 1.25 / times
    assert len({shares["b1"] for shares in last}) <= 2


def test_shares_are_limited_and_slow() -> None:
    """Even a replica that takes 50 times as long keeps a quarter; no step is larger than a quarter of the share."""
    model = _Model(60, {"a1": 1000, "b1": 1000}, {"a1": 0.02, "b1": 1.0})
    seen = [{"a1": 100, "b1": 100}, *model.run(400)]
    assert seen[-1] == {"a1": 100, "b1": int(100 * LEAST_SHARE)}
    for before, after in itertools.pairwise(seen):
        assert after["b1"] >= 0.64 * before["b1"] - 5


def test_equal_or_idle_replicas_keep_their_shares() -> None:
    """Replicas of one kind are never distinguished; without load nothing changes."""
    one_kind = _Model(60, {"a1": 100, "a2": 10}, {"a1": 0.1, "a2": 1.0})
    assert one_kind.run(200)[-1] == {"a1": 100, "a2": 100}
    idle = _Model(1, {"a1": 100, "b1": 10}, {"a1": 0.1, "b1": 1.0})
    assert idle.run(200)[-1] == {"a1": 100, "b1": 100}


@pytest.mark.long
def test_haproxy_sends_a_slow_gpu_type_less(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """The weight of the slow type falls under load, but not below its limit; `round_robin` has equal weights."""
    fast, slow = replicas
    entries = [fast.entry(), slow.entry(gpu_type="t4")]
    api.set(entries, policy="least_connections")
    balancer = start()
    balancer.wait_replicas(set(replicas))
    slow.behave(after_s="0.6")
    fast.behave(after_s="0.1")
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=balancer.url, timeout=30) as client:
            while not over.is_set():
                assert client.get("/").status_code == 200

    def weight(replica: Replica, backend: str = "least_connections") -> float:
        rows = [row.split() for row in balancer.ask(f"show servers state {backend}").splitlines()[2:] if row]
        return next((float(row[7]) for row in rows if row[18] == str(replica.port)), -1.0)

    clients = [threading.Thread(target=ask) for _ in range(12)]
    for client in clients:
        client.start()
    try:
        wait_for("the slow replica has less weight", lambda: weight(slow) <= 70, 90)
        assert weight(fast) == 100 and weight(slow) >= 25
        api.set(entries, policy="round_robin")
        wait_for("replicas have equal turns", lambda: weight(slow, "round_robin") == 100)
    finally:
        over.set()
        for client in clients:
            client.join()
