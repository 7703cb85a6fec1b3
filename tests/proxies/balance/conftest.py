"""Fixtures of the balancer's tests: an API, replicas and a balancer."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.balance_api import BalanceApi
from tests.proxies.balance.world import Balancer, Replica, running


@pytest.fixture
def api() -> Iterator[BalanceApi]:
    api = BalanceApi()
    api.start()
    yield api
    api.stop()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    """Two replicas."""
    started = [Replica(number) for number in range(2)]
    yield started
    for replica in started:
        replica.kill()


@pytest.fixture
def start(api: BalanceApi, tmp_path: Path) -> Iterator[Callable[..., Balancer]]:
    """Returns a function that starts a balancer with these options."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def begin(*options: str) -> Balancer:
            return stack.enter_context(running(Balancer(api, tmp_path / "data", *options)))

        yield begin
