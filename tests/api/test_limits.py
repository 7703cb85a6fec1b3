"""Limits of keys, tenants and connections, most of them with an API in a separate process."""

import asyncio
import contextlib
import gzip
import hashlib
import random
import socket
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.auth import Caller, Role
from api.documents import syntax
from api.documents.document_turns import Turns
from domain.phases import Phase
from infra.config.settings import Settings
from tests.api.conftest import api_process
from tests.api.world import ARCHIVE, ApiWorld, as_yaml, document, make_world
from tests.databases import Databases

SMALL: dict[str, Any] = {
    "header_timeout_s": 1.0, "body_timeout_s": 1.0, "streams_per_key": 3, "streams_per_tenant": 4,
    "concurrent_per_key": 64, "queued_per_tenant": 3, "archive_bytes_per_tenant": 16 << 20, "secrets_per_tenant": 2,
}  # fmt: skip
"""Limits low enough for a test to reach quickly."""


@pytest.fixture(scope="module")
def limited(
    databases: Databases, tmp_path_factory: pytest.TempPathFactory, checkout: Path
) -> Iterator[tuple[ApiWorld, str]]:
    """Yields a world and the URL of its API with low limits."""
    folder = tmp_path_factory.mktemp("limited")
    with (
        databases.taken() as url,
        make_world(url, folder, limits=SMALL) as world,
        api_process(world, folder, checkout) as base,
    ):
        yield world, base


@asynccontextmanager
async def user(api: tuple[ApiWorld, str], key: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client with a key of the world."""
    world, base = api
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, headers=world.headers(key), timeout=60, limits=limits) as client:
        yield client


async def put(client: httpx.AsyncClient, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/gzip"}
    return await client.put(f"/v1/archives/{hashlib.sha256(body).hexdigest()}", content=body, headers=headers)


async def _others_are_served(limited: tuple[ApiWorld, str], attack: "asyncio.Future[Any]") -> int:
    """Sends requests as another user until the attack ends; returns the number of rounds."""
    served = 0
    async with user(limited, "speech") as other:
        while not attack.done() or not served:
            for path in ("/v1/whoami", "/v1/workloads", "/healthz"):
                assert (await other.get(path, timeout=20)).status_code == 200
            served += 1
            await asyncio.sleep(0.1)
    return served


@pytest.mark.rotating
async def test_sizes_that_are_not_there_cost_nothing(limited: tuple[ApiWorld, str]) -> None:
    """Archives whose headers declare 900 PB are refused, and other users are served meanwhile."""
    info = tarfile.TarInfo("a")
    info.pax_headers = {"size": "900000000000000000"}
    body = gzip.compress(info.tobuf(tarfile.PAX_FORMAT) + b"\0" * 1024)
    async with user(limited, "vision") as client:
        attack = asyncio.gather(*(put(client, body) for _ in range(41)))
        await _others_are_served(limited, attack)
        answers = Counter(answer.status_code for answer in await attack)
        assert (
            (await put(client, body))
            .json()["errors"][0]["message"]
            .startswith("the archive cannot be unpacked: the content has more than")
        )
    assert set(answers) <= {422, 429}
    assert answers[422] > 0


@pytest.mark.long
async def test_archives_that_unpack_to_much_delay_nobody(limited: tuple[ApiWorld, str]) -> None:
    """Parallel uploads of large archives over the limit get 429, and other users are served meanwhile."""
    member = tarfile.TarInfo("zeros")
    member.size = 128 << 20
    bodies = []
    whole = gzip.compress(member.tobuf() + bytes(128 << 20) + bytes(1024), compresslevel=1)
    for number in range(12):
        note = tarfile.TarInfo(f"note-{number}")
        bodies.append(gzip.compress(note.tobuf()) + whole)
    async with user(limited, "vision") as client:
        attack = asyncio.gather(*(put(client, body) for body in bodies))
        served = await _others_are_served(limited, attack)
        answers = await attack
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["limit"] == {"name": "limits.uploads_per_key", "value": 4.0}
    assert int(refused.headers["retry-after"]) > 0
    assert served > 1


async def test_large_documents_take_turns() -> None:
    """Of each tenant one large document is processed at a time, so a tenant with many of them does not delay others."""
    turns, large = Turns(), bytes(1 << 20)
    order: list[str] = []
    busy: Counter[str] = Counter()

    def work(tenant: str) -> int:
        busy[tenant] += 1
        order.append(tenant)
        time.sleep(0.02)
        busy[tenant] -= 1
        return busy[tenant]

    def ask(tenant: str, key: int) -> "asyncio.Task[int]":
        caller = Caller(f"key-{key}", Role.SUBMITTER, tenant, "")
        return asyncio.create_task(turns.run(caller, large, partial(work, tenant)))

    many = [ask("vision", number) for number in range(16)]
    while len(order) < 2:
        await asyncio.sleep(0.001)
    other = ask("speech", 0)
    assert await other == 0 and len(order) <= 5
    assert await asyncio.gather(*many) == [0] * 16


@pytest.mark.parametrize(
    "text",
    [
        b"a: " + b"x y " * 500_000,
        b'a: "' + b"\\x41" * 500_000 + b'"',
        b"".join(b"a%d: %s\n" % (n, b"v" * 90) for n in range(9900)),
        b"".join(b"%%TAG !%d! b\n" % n for n in range(60_000)),
    ],
    ids=["words", "escapes", "unknown keys", "directives"],
)
async def test_documents_of_the_maximum_size_delay_nobody(limited: tuple[ApiWorld, str], text: bytes) -> None:
    """Documents that fill the limit on bodies are parsed by libyaml and answered, and others are served meanwhile."""
    assert syntax._LOADER is yaml.CSafeLoader
    headers = {"content-type": "application/yaml"}
    async with user(limited, "vision") as client:
        attack = asyncio.gather(*(client.post("/v1/workloads", content=text, headers=headers) for _ in range(6)))
        await _others_are_served(limited, attack)
        assert {answer.status_code for answer in await attack} == {422}


def test_one_address_cannot_take_all_connections(
    database_url: str, tmp_path: Path, serve: Callable[[ApiWorld], str]
) -> None:
    """Connections of one address that send no request are limited; other addresses are served, and so is that address
    once it has closed some.
    """
    with make_world(database_url, tmp_path, limits={"connections": 80, "connections_per_address": 20}) as world:
        place = ("127.0.0.1", int(serve(world).rsplit(":", 1)[1]))
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(place, timeout=30)) for _ in range(200)]
            assert _asked(place, "127.0.0.2", world) == 200
            assert _asked_on(idle[0], world) == 200
            assert _asked_on(idle[20], world) == 429, "the connection is over the limit"
            assert _asked_on(idle[150], world) == 503, "the connection was closed at once"
        deadline_s = time.monotonic() + 30
        while _asked(place, "127.0.0.1", world) != 200:
            assert time.monotonic() < deadline_s


def test_a_trusted_proxy_has_no_limit_by_address(
    database_url: str, tmp_path: Path, serve: Callable[[ApiWorld], str]
) -> None:
    """The connections of a proxy are those of many users."""
    limits = {"connections": 80, "connections_per_address": 2}
    with make_world(database_url, tmp_path, limits=limits, api={"trusted_proxies": ["127.0.0.0/30"]}) as world:
        place = ("127.0.0.1", int(serve(world).rsplit(":", 1)[1]))
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(place, timeout=30))
            assert _asked(place, "127.0.0.1", world) == 200


def _asked(place: tuple[str, int], source: str, world: ApiWorld) -> int:
    """Sends a request from an address; returns the status of the response."""
    with socket.create_connection(place, timeout=30, source_address=(source, 0)) as connection:
        return _asked_on(connection, world)


def _asked_on(connection: socket.socket, world: ApiWorld) -> int:
    authorization = world.headers("vision")["Authorization"]
    with contextlib.suppress(OSError):  # The server may have closed the connection, with an answer.
        connection.sendall(f"GET /v1/whoami HTTP/1.1\r\nHost: api\r\nAuthorization: {authorization}\r\n\r\n".encode())
    return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({f"k{number}": 1 for number in range(120_000)}, "a mapping has 120000 members; must have at most 1000"),
        ({"ids": [1] * 300_000}, "the body has more than 200000 values"),
    ],
    ids=["keys", "values"],
)
async def test_json_bodies_of_too_many_values_are_refused_as_a_whole(
    limited: tuple[ApiWorld, str], body: dict[str, Any], message: str
) -> None:
    """They get one error instead of one for each value."""
    async with user(limited, "vision") as client:
        answer = await client.post("/v1/workloads/cancel", json=body)
    assert answer.status_code == 422
    assert [error["message"] for error in answer.json()["errors"]] == [message]


async def test_one_key_cannot_open_all_streams(limited: tuple[ApiWorld, str]) -> None:
    """Streams are limited by key and by tenant; other tenants are not affected, and a closed stream makes room."""
    async with user(limited, "vision-viewer") as viewer, user(limited, "vision") as peer, AsyncExitStack() as stack:

        async def opened(client: httpx.AsyncClient, to: AsyncExitStack) -> httpx.Response:
            stream = await to.enter_async_context(client.stream("GET", "/v1/events"))
            if stream.status_code != 200:
                await stream.aread()
            return stream

        inner = await stack.enter_async_context(AsyncExitStack())
        answers = [await opened(viewer, stack if number else inner) for number in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[-1].json()["limit"] == {"name": "limits.streams_per_key", "value": 3.0}
        assert "retry-after" in answers[-1].headers
        answers = [await opened(peer, stack) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[-1].json()["limit"] == {"name": "limits.streams_per_tenant", "value": 4.0}
        async with user(limited, "speech") as other, AsyncExitStack() as theirs:
            assert (await opened(other, theirs)).status_code == 200
        await inner.aclose()
        while (await opened(viewer, stack)).status_code != 200:
            await asyncio.sleep(0.05)


async def test_requests_have_a_rate(database_url: str, tmp_path: Path) -> None:
    """A key over its request rate gets 429 until Retry-After has passed; other keys and `/healthz` are served."""
    limits = {"requests_per_key": 2.0, "burst_s": 2.0}
    with make_world(database_url, tmp_path, limits=limits) as world:
        async with world.client("vision") as client, world.client("speech") as other:
            answers = [await client.get("/v1/whoami") for _ in range(6)]
            assert [answer.status_code for answer in answers][:4] == [200] * 4
            refused = answers[-1]
            assert (refused.status_code, refused.json()["limit"]) == (
                429, {"name": "limits.requests_per_key", "value": 2.0},
            )  # fmt: skip
            assert (await other.get("/v1/whoami")).status_code == 200
            assert (await client.get("/healthz")).status_code == 200
            await asyncio.sleep(int(refused.headers["retry-after"]))
            assert (await client.get("/v1/whoami")).status_code == 200


async def test_requests_at_the_same_time(database_url: str, tmp_path: Path) -> None:
    """Concurrent requests are limited by key; while a key's requests hang, other keys and `/healthz` are served."""
    limits = {"concurrent_per_key": 2}
    with make_world(database_url, tmp_path, limits=limits) as world:
        async with world.client("vision") as client, world.client("speech") as other:
            with world.session() as session:
                session.connection().exec_driver_sql("lock table secret in access exclusive mode")
                hanging = [asyncio.create_task(client.get("/v1/tenants/vision/secrets")) for _ in range(2)]
                await asyncio.sleep(0.2)
                refused = await client.get("/v1/whoami")
                assert (refused.status_code, refused.json()["limit"]["name"]) == (429, "limits.concurrent_per_key")
                assert (await other.get("/v1/whoami")).status_code == 200
                assert (await client.get("/healthz")).status_code == 200
            assert [answer.status_code for answer in await asyncio.gather(*hanging)] == [200, 200]
            assert (await client.get("/v1/whoami")).status_code == 200


async def test_health_tells_of_threads_that_are_all_busy(database_url: str, tmp_path: Path) -> None:
    """While all request threads hang, `/healthz` returns 503 and `/v1/whoami` works; afterwards it returns 200."""
    limits = {"concurrent_per_key": 100, "concurrent_per_tenant": 100, "health_s": 0.3}
    with make_world(database_url, tmp_path, limits=limits) as world:
        async with world.client("vision") as client, world.client(None) as probe:
            with world.session() as session:
                session.connection().exec_driver_sql("lock table secret in access exclusive mode")
                hanging = [asyncio.create_task(client.get("/v1/tenants/vision/secrets")) for _ in range(41)]
                while (health := await probe.get("/healthz")).status_code == 200:
                    await asyncio.sleep(0.05)
                assert (health.status_code, health.json()["type"]) == (503, "urn:mizzen:problem:busy")
                assert (await client.get("/v1/whoami")).status_code == 200
            assert {answer.status_code for answer in await asyncio.gather(*hanging)} == {200}
            assert (await probe.get("/healthz")).status_code == 200


async def test_queued_workloads_of_a_tenant(limited: tuple[ApiWorld, str]) -> None:
    """The queued workloads of a tenant are limited, also for concurrent submissions."""
    world, _ = limited
    async with user(limited, "vision") as client:
        headers = {"content-type": "application/yaml"}
        posts = (client.post("/v1/workloads", content=as_yaml(document()), headers=headers) for _ in range(12))
        answers = await asyncio.gather(*posts)
        assert Counter(answer.status_code for answer in answers) == {202: 3, 429: 9}
        refused = next(answer for answer in answers if answer.status_code == 429).json()
        assert refused["limit"] == {"name": "limits.queued_per_tenant", "value": 3.0}
        assert "tenant vision has 3" in refused["detail"]
        ended = next(answer for answer in answers if answer.status_code == 202).json()["id"]
        world.set_phase(ended, Phase.CANCELLED)
        assert (await client.post("/v1/workloads", content=as_yaml(document()), headers=headers)).status_code == 202


def _stored(content: bytes) -> bytes:
    """Returns an archive of one file without compression, which is fast to create."""
    member = tarfile.TarInfo("noise")
    member.size = len(content)
    return gzip.compress(member.tobuf() + content + bytes(-len(content) % 512 + 1024), compresslevel=0)


async def test_archive_bytes_of_a_tenant(limited: tuple[ApiWorld, str]) -> None:
    """The archive bytes of a tenant are limited; an existing archive may be uploaded again."""
    generator = random.Random(0)
    bodies = [_stored(generator.randbytes(3 << 20)) for _ in range(6)]
    async with user(limited, "speech") as client:
        answers = [await put(client, body) for body in bodies]
        assert (answers[0].status_code, answers[-1].status_code) == (200, 429)
        assert answers[-1].json()["limit"] == {"name": "limits.archive_bytes_per_tenant", "value": 16 << 20}
        assert (await put(client, bodies[0])).status_code == 200
    async with user(limited, "vision") as other:
        assert (await put(other, ARCHIVE)).status_code == 200


async def test_secrets_of_a_tenant(limited: tuple[ApiWorld, str]) -> None:
    """The secrets of a tenant are limited; existing ones can still be changed."""
    async with user(limited, "vision") as client:

        async def set_(name: str) -> int:
            return (await client.put(f"/v1/tenants/vision/secrets/{name}", json={"value": "x"})).status_code

        assert [await set_("one"), await set_("two"), await set_("hf-token")] == [200, 429, 200]


HALF_SENT = {
    "nothing": b"",
    "half a head": b"GET /healthz HTTP/1.1\r\nHost: api\r\nX-Slow: ",
    "half a body": b"POST /v1/workloads HTTP/1.1\r\nHost: api\r\nAuthorization: {key}\r\n"
    b"Content-Type: application/yaml\r\nContent-Length: 100\r\n\r\nversion: 1",
    "half an archive": b"PUT /v1/archives/" + b"0" * 64 + b" HTTP/1.1\r\nHost: api\r\nAuthorization: {key}\r\n"
    b"Content-Length: 5000\r\n\r\n\x1f\x8b",
    "half a second head": b"GET /healthz HTTP/1.1\r\nHost: api\r\n\r\nGET /healthz HTTP/1.1\r\nHost: a",
    "half a body with a bad key": b"POST /v1/workloads HTTP/1.1\r\nHost: api\r\nContent-Length: 100\r\n\r\nversion: 1",
}


@pytest.mark.parametrize("what", HALF_SENT)
def test_half_sent_requests_time_out(limited: tuple[ApiWorld, str], what: str) -> None:
    """A connection on which a request is incomplete, or arrives byte by byte, is closed after a timeout."""
    world, base = limited
    authorization = world.headers("vision")["Authorization"].encode()
    with socket.create_connection(("127.0.0.1", int(base.rsplit(":", 1)[1])), timeout=0.2) as connection:
        connection.sendall(HALF_SENT[what].replace(b"{key}", authorization))
        got, deadline_s = b"", time.monotonic() + 30
        while time.monotonic() < deadline_s:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                part = None
            except ConnectionResetError:
                break  # The server closed the connection while the next byte was in flight.
            if part == b"":
                break
            got += part or b""
            with contextlib.suppress(OSError):
                if what != "nothing":
                    connection.sendall(b"x")
        else:
            pytest.fail("the connection is still open")
    if what in ("half a head", "half a body", "half an archive"):
        assert got.startswith(b"HTTP/1.1 408 ")
    if what == "half a second head":
        assert b"HTTP/1.1 200 " in got


def test_a_client_that_is_refused_while_it_sends_hears_why(limited: tuple[ApiWorld, str]) -> None:
    """A client that is refused while it sends its body can read the response afterwards and reuse the connection."""
    _, base = limited
    head = b"POST /v1/workloads HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: %d\r\n\r\n"
    parts = 15
    with socket.create_connection(("127.0.0.1", int(base.rsplit(":", 1)[1])), timeout=30) as connection:
        connection.sendall(head % (parts << 16))
        for _ in range(parts):
            time.sleep(0.1)
            connection.sendall(b" " * (1 << 16))
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200 " in connection.recv(65536)


def test_defaults_let_a_sweep_through() -> None:
    """The default limits allow 5,000 queued workloads of a tenant and ten concurrent requests."""
    limits = Settings().limits
    assert limits.queued_per_tenant >= 5000
    assert min(limits.concurrent_per_key, limits.concurrent_per_tenant) >= 10
