"""Limits of client addresses: failed logins and connections."""

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.types import Scope

from api.logins import FailedLogins, address_of
from infra.config.settings import load_settings
from infra.errors import ConfigurationError
from tests.api.world import ApiWorld, make_world

FEW = {"failed_logins_per_address": 0.5, "failed_logins_burst": 3}


def _from(world: ApiWorld, address: str, authorization: str | None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(world.app, client=(address, 4711))
    headers = {} if authorization is None else {"authorization": authorization}
    return httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers)


async def test_failed_logins_of_an_address(database_url: str, tmp_path: Path) -> None:
    """After too many failed logins an address gets 429; requests with valid keys and other addresses are served."""
    good = "Authorization"
    with make_world(database_url, tmp_path, limits=FEW) as world:
        async with _from(world, "192.0.2.1", "Bearer mzn_wrong") as bad:
            answers = [await bad.get("/v1/whoami") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [401] * 3 + [429] * 3
        refused = answers[-1]
        assert refused.json()["limit"] == {"name": "limits.failed_logins_per_address", "value": 0.5}
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert "192.0.2.1" in refused.json()["detail"] and "is unknown" in refused.json()["detail"]
        async with _from(world, "192.0.2.1", world.headers("vision")[good]) as neighbour:
            assert [(await neighbour.get("/v1/whoami")).status_code for _ in range(5)] == [200] * 5
        async with _from(world, "192.0.2.1", None) as keyless:
            assert (await keyless.get("/v1/whoami")).status_code == 429
            assert (await keyless.get("/healthz")).status_code == 200
        async with _from(world, "192.0.2.2", "Bearer mzn_wrong") as other:
            assert (await other.get("/v1/whoami")).status_code == 401


def test_addresses_take_bounded_memory() -> None:
    """Only a limited number of addresses is stored, least recently failed evicted; the limit recovers with time."""
    now_s = 0.0
    failed = FailedLogins(1.0, 2, lambda: now_s, addresses=3)
    for n in range(100):
        assert failed.count(f"198.51.100.{n}") == 0
    assert len(failed) == 3
    assert [failed.count("198.51.100.99") for _ in range(2)] == [0, 1]
    assert failed.is_over("198.51.100.99") and not failed.is_over("198.51.100.98")
    now_s = 1.0
    assert not failed.is_over("198.51.100.99")
    assert failed.count("198.51.100.99") == 0


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3::4", 1), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("x" * 500, 1), "x" * 64),
        (None, "unknown"),
    ],
)
def test_what_counts_as_one_address(client: tuple[str, int] | None, address: str) -> None:
    """IPv6 addresses are grouped by /64 network; a forwarded text that is not an address is truncated."""
    scope: Scope = {"type": "http", "client": client}
    assert address_of(scope) == address


@pytest.mark.parametrize("trusted", [False, True])
def test_forwarded_addresses(
    database_url: str, tmp_path: Path, serve: Callable[[ApiWorld], str], trusted: bool
) -> None:
    """X-Forwarded-For is used only if the client is a trusted proxy."""
    api = {"trusted_proxies": ["127.0.0.0/8"]} if trusted else {}
    with make_world(database_url, tmp_path, limits=FEW, api=api) as world:
        url = serve(world)
        answers = []
        for n in range(6):
            # The first address is forged by the client; the second one was added by the proxy.
            headers = {"x-forwarded-for": f"198.51.100.{n}, 203.0.113.{n % 2}", "authorization": "Bearer mzn_wrong"}
            answers.append(httpx.get(f"{url}/v1/whoami", headers=headers).status_code)
        assert answers == ([401] * 6 if trusted else [401] * 3 + [429] * 3)


def test_trusted_proxies_are_addresses(tmp_path: Path) -> None:
    """A host name, `*` or an invalid network is an error with the valid values."""
    for wrong in ("*", "proxy.example.com", "10.0.0.1/8"):
        (tmp_path / "s.yaml").write_text(f"api: {{trusted_proxies: ['{wrong}']}}")
        with pytest.raises(ConfigurationError, match="must be an address or a network"):
            load_settings(tmp_path / "s.yaml")


@pytest.fixture
def full(
    database_url: str, tmp_path: Path, serve: Callable[[ApiWorld], str]
) -> Iterator[tuple[str, list[socket.socket]]]:
    """Yields the URL of an API with a limit of 5 connections, and the 5 open connections, each with an event stream."""
    limits = {"connections": 5, "header_timeout_s": 600}
    with make_world(database_url, tmp_path, limits=limits) as world, ExitStack() as stack:
        url = serve(world)
        key = world.headers("operator")["Authorization"]
        held = []
        for _ in range(5):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=30))
            one.sendall(f"GET /v1/events HTTP/1.1\r\nHost: api\r\nAuthorization: {key}\r\n\r\n".encode())
            assert one.recv(15) == b"HTTP/1.1 200 OK"
            held.append(one)
        yield url, held


def test_connections_are_bounded(full: tuple[str, list[socket.socket]]) -> None:
    """A connection over the limit gets 503 with Retry-After, except for `/healthz`; a closed one makes room."""
    url, held = full
    refused = httpx.get(f"{url}/v1/whoami")
    assert (refused.status_code, refused.json()["limit"]) == (503, {"name": "limits.connections", "value": 5.0})
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
    assert httpx.get(f"{url}/healthz").status_code == 200
    held.pop().close()
    while httpx.get(f"{url}/v1/whoami").status_code == 503:
        pass


@pytest.mark.rotating
def test_connections_far_beyond_the_limit_are_closed(full: tuple[str, list[socket.socket]]) -> None:
    """Idle connections far over the limit are closed immediately."""
    url, _ = full
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(300)]
        for one in idle:
            one.settimeout(0.2)
        seen: Counter[bytes] = Counter()
        for one in idle:
            with contextlib.suppress(TimeoutError):
                seen[one.recv(12)] += 1
    assert seen[b"HTTP/1.1 503"] >= 300 - 64
