"""Requests reach exactly the replicas that the API lists, through every kind of restart."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.balance.world import Api, Balancer, Replica, wait_for

Start = Callable[..., Balancer]


def test_replicas_come_and_go_without_a_restart_of_haproxy(api: Api, replicas: list[Replica], start: Start) -> None:
    """Replicas of the list get requests in turn; changes take effect without another HAProxy process."""
    first, second = replicas
    api.set([first.entry()])
    balancer = start()
    balancer.wait_replicas({first})
    haproxy = balancer.haproxy()
    api.set([first.entry(), second.entry()])
    balancer.wait_replicas({first, second})
    with httpx.Client() as client:
        ports = [client.get(balancer.url).headers["x-replica"] for _ in range(20)]
    assert ports.count(str(first.port)) == ports.count(str(second.port)) == 10
    api.set([first.entry(state="draining"), second.entry()])
    balancer.wait_replicas({second})
    api.set([first.entry()])
    balancer.wait_replicas({first})
    assert balancer.haproxy() == haproxy != 0
