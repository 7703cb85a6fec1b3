"""Requests with the same key go to the same replica, while it is not far busier than the others.

The services have a limit on the first byte. Without one, a replica whose process gets no CPU for two seconds counts as
hung, and its sessions move.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.balance_api import BalanceApi
from domain.service import STICKY_PREFIXES_BYTES
from proxies.balance.values import PREFIXES_BYTES
from tests.proxies.balance.world import Balancer, Replica, running, wait_for

Start = Callable[..., Balancer]
SESSIONS = [f"user {number}" for number in range(30)]
PATIENT = {"first_byte_s": 60, "request_timeout_s": 60}
AT_ONCE = 12


@pytest.fixture
def three(replicas: list[Replica]) -> Iterator[list[Replica]]:
    """Three replicas."""
    third = Replica(2)
    yield [*replicas, third]
    third.kill()


def _places(url: str, header: str = "X-Session") -> dict[str, str]:
    """Returns the replica of each session; each session sends three requests."""
    found: dict[str, str] = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for session in SESSIONS * 3:
            replica = client.get("/", headers={header: session}).headers["x-replica"]
            assert found.setdefault(session, replica) == replica
    return found


def _at_once(url: str, replicas: Sequence[Replica], headers: Mapping[str, str] | None = None) -> list[int]:
    """Returns how many requests each replica has while `AT_ONCE` requests are in progress."""
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(client.get, "/hold", headers=headers) for _ in range(AT_ONCE)]
        try:
            wait_for("all are in progress", lambda: sum(one.held for one in replicas) == AT_ONCE)
            counts = [one.held for one in replicas]
        finally:
            for one in replicas:
                one.release()
        assert {one.result().status_code for one in asked} == {200}
    return counts


def _is_set(balancer: Balancer, name: str, value: int) -> bool:
    return f"<{value}>" in balancer.ask(f"get var proc.{name}")


@pytest.mark.rotating
def test_sessions_stay_with_their_replica(api: BalanceApi, three: list[Replica], start: Start, tmp_path: Path) -> None:
    """By a header: also after a restart of HAProxy, through another balancer, and while another replica leaves."""
    entries = [one.entry() for one in three]
    api.set(entries, sticky_header="X-Session", **PATIENT)
    balancer = start()
    balancer.wait_replicas(set(three))  # Requests without the header are balanced as before.
    before = _places(balancer.url)
    assert set(before.values()) == {str(one.port) for one in three}
    old = balancer.haproxy()
    os.kill(old, signal.SIGKILL)
    wait_for("HAProxy is restarted", lambda: balancer.haproxy() not in (0, old))
    wait_for("it answers", lambda: httpx.get(balancer.url).status_code == 200)
    assert _places(balancer.url) == before
    other = Balancer(api, tmp_path / "other" / "data")
    other.data.mkdir(parents=True)
    with running(other):
        other.wait_replicas(set(three))
        assert _places(other.url) == before
    api.set(entries[:2], sticky_header="X-Session", **PATIENT)
    balancer.wait_replicas(set(three[:2]))
    gone = str(three[2].port)
    stayed = {session: port for session, port in before.items() if port != gone}
    assert _places(balancer.url).items() >= stayed.items()


def test_stickiness_changes_without_a_restart(api: BalanceApi, three: list[Replica], start: Start) -> None:
    """It begins, gets another header, and ends while HAProxy runs."""
    entries = [one.entry() for one in three]
    api.set(entries, **PATIENT)
    balancer = start()
    balancer.wait_replicas(set(three))
    haproxy = balancer.haproxy()

    def place(header: str) -> int:
        with httpx.Client(base_url=balancer.url, timeout=60) as client:
            return len({client.get("/", headers={header: "me"}).headers["x-replica"] for _ in range(6)})

    assert place("X-Session") == 3
    for header, other in (("X-Session", "x-user_id"), ("X-User_Id", "x-session")):
        api.set(entries, sticky_header=header, **PATIENT)
        wait_for("the header is in use", lambda header=header: place(header) == 1)
        assert place(other) == 3
    api.set(entries, **PATIENT)
    wait_for("stickiness has ended", lambda: place("X-User_Id") == 3)
    assert balancer.haproxy() == haproxy


def test_equal_beginnings_of_bodies_go_together(api: BalanceApi, three: list[Replica], start: Start) -> None:
    """By the first bytes of the body, whatever follows. Requests without a body, or in chunks, are balanced alone."""
    assert PREFIXES_BYTES == STICKY_PREFIXES_BYTES
    balancer = start()
    for size in PREFIXES_BYTES:
        api.set([one.entry() for one in three], sticky_prefix_bytes=size, **PATIENT)
        wait_for("HAProxy has the size", lambda size=size: _is_set(balancer, "key_bytes", size))
        balancer.wait_replicas(set(three))
        seen = set()
        with httpx.Client(base_url=balancer.url, timeout=60) as client:
            for prompt in range(24):  # So many that each replica has some, however the ports are hashed.
                prefix = (b"%d " % prompt * size)[:size]
                ports = {
                    client.post("/", content=prefix + b"x" * more).headers["x-replica"] for more in (0, 1, 50_000, 9)
                }
                assert len(ports) == 1
                seen |= ports
            short = {client.post("/", content=b"short").headers["x-replica"] for _ in range(4)}
            chunks = {client.post("/", content=iter([b"x" * 5000])).headers["x-replica"] for _ in range(6)}
        assert (len(seen), len(short), len(chunks)) == (3, 1, 3)


def test_a_busy_replica_gets_no_more_of_a_session(api: BalanceApi, three: list[Replica], start: Start) -> None:
    """Of many requests with one key at a time, a replica gets at most half as many again as the mean."""
    api.set([one.entry() for one in three], sticky_header="X-Session", **PATIENT)
    balancer = start()
    balancer.wait_replicas(set(three))
    assert max(_at_once(balancer.url, three, {"X-Session": "me"})) <= 7
    assert len(_places(balancer.url)) == len(SESSIONS)


def test_sessions_stay_near_until_the_zone_is_overloaded(api: BalanceApi, three: list[Replica], start: Start) -> None:
    """With `least_load`, keys are distributed over the near replicas; without a near one, over all others."""
    near = three[:2]
    entries = [*(one.entry(zone="a") for one in near), three[2].entry(zone="b")]
    api.set(entries, policy="least_load", sticky_header="X-Session", **PATIENT)
    balancer = start("--zone", "east/a", "--overload", "2")
    balancer.wait_replicas(set(near))
    assert set(_places(balancer.url).values()) == {str(one.port) for one in near}
    assert _at_once(balancer.url, three)[2] > 0
    api.set(entries[2:], policy="least_load", sticky_header="X-Session", **PATIENT)
    balancer.wait_replicas({three[2]})
    assert set(_places(balancer.url).values()) == {str(three[2].port)}
