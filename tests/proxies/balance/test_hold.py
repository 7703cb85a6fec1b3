"""Requests that arrive while no replica is ready: they wait for the first one, within limits."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.balance_api import NAME, BalanceApi
from tests.proxies.balance.world import Balancer, Replica, wait_for

Start = Callable[..., Balancer]


def _waiting(api: BalanceApi) -> int:
    return int(api.now.get(NAME, {"waiting": 0})["waiting"])


def test_requests_wait_for_the_first_replica(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """They are reported at once, also those whose body is large, and all are answered. Later ones do not wait."""
    api.set([], hold_s=60)
    balancer = start()
    for policy in ("round_robin", "least_connections"):
        api.set([], hold_s=60, policy=policy)
        wait_for("HAProxy has the policy", lambda policy=policy: policy in balancer.ask("get var proc.policy"))
        wait_for("no replica is left", lambda: balancer.servers() <= {"0"} and _held(balancer))
        with httpx.Client(base_url=balancer.url, timeout=60) as client, ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(client.post, "/", content=b"x" * 100_000 * number) for number in range(6)]
            wait_for("the requests are reported", lambda: _waiting(api) == 6)
            api.set([replicas[0].entry()], hold_s=60, policy=policy)
            answers = [one.result() for one in asked]
            assert [answer.status_code for answer in answers] == [200] * 6
            assert client.get("/").status_code == 200
        wait_for("none waits", lambda: _waiting(api) == 0)
    assert api.total("failed") == 0
    assert balancer.stop() == 0


@pytest.mark.rotating
def test_waiting_requests_are_limited(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """In number and in time; a client that leaves frees its place."""
    api.set([], hold_s=2, max_queue=2)
    balancer = start()
    wait_for("requests wait", lambda: httpx.get(balancer.url, timeout=30).status_code == 503)

    def ask(timeout_s: float) -> httpx.Response:
        return httpx.get(balancer.url, timeout=timeout_s)

    with ThreadPoolExecutor(4) as pool:
        first: list[Future[httpx.Response]] = [pool.submit(ask, 30) for _ in range(4)]
        answers = [one.result() for one in first]
    assert [answer.status_code for answer in answers] == [503] * 4
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
    assert sum("queue" in answer.text for answer in answers) == 2
    replaced = balancer.haproxy()
    api.set([], hold_s=60, max_queue=1)
    wait_for("HAProxy has the new time", lambda: balancer.haproxy() not in (0, replaced) and _held(balancer))
    assert "<1>" in balancer.ask("get var proc.max_queue")
    for _ in range(2):
        try:
            ask(1.5)
        except httpx.ReadTimeout:
            continue
        raise AssertionError("the request was not held")
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(ask, 60)
        wait_for("it waits", lambda: _waiting(api) == 1)
        api.set([replicas[0].entry()], hold_s=60, max_queue=1)
        assert last.result().status_code == 200


def test_requests_wait_when_haproxy_has_just_started(api: BalanceApi, replicas: list[Replica], start: Start) -> None:
    """Requests that arrived while HAProxy did not run are not refused."""
    api.set([], hold_s=60)
    balancer = start()
    wait_for("requests are held", lambda: _held(balancer))
    assert balancer.process is not None
    with contextlib.ExitStack() as stack:
        balancer.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{balancer.process.pid}/task")
        wait_for("it stands still", lambda: all(_is_in(one, "T") for one in tasks.iterdir()))
        os.kill(killed := balancer.haproxy(), signal.SIGKILL)
        wait_for("HAProxy has closed its sockets", lambda: _is_in(Path(f"/proc/{killed}"), "Z"))
        asked = [stack.enter_context(socket.create_connection(("127.0.0.1", balancer.port))) for _ in range(4)]
        for one in asked:
            one.sendall(b"GET / HTTP/1.1\r\nHost: chat\r\n\r\n")
        balancer.process.send_signal(signal.SIGCONT)
        wait_for("the requests are reported", lambda: _waiting(api) == 4)
        api.set([replicas[0].entry()], hold_s=60)
        assert [one.recv(15) for one in asked] == [b"HTTP/1.1 200 OK"] * 4


def _is_in(process: Path, state: str) -> bool:
    return f"State:\t{state}" in (process / "status").read_text()


def _held(balancer: Balancer) -> bool:
    return "hold,plug,0,0,1" in balancer.ask("show stat -1 4 -1")
