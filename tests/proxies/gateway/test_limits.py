"""Limits of the gateway: calls without a key or a request, sizes of requests, bytes, and lookups of keys."""

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, func, update
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.workflowservice import v1 as service

from infra.db.session import transaction
from infra.db.tenants import ApiKey
from infra.keys import new_api_key
from infra.stack.ports import free_port
from proxies.gateway.keys import MachineSession, Sessions
from proxies.gateway.methods import SERVICE
from proxies.gateway.refusals import Refused
from tests.agent.harness import Lab, until_async
from tests.proxies.gateway.site import Caller, Site

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
HERE = "192.0.2.1"


async def _without_request(caller: Caller) -> tuple[grpc.StatusCode, str]:
    """Returns status and message of a call that sends only its metadata."""

    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    call = caller.channel.stream_unary(f"/{SERVICE}/GetSystemInfo")
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call(never(), metadata=caller.metadata, timeout=20)
    return ended.value.code(), ended.value.details() or ""


def _heartbeat(size_bytes: int) -> service.RecordActivityTaskHeartbeatRequest:
    details = Payloads(payloads=[Payload(data=bytes(size_bytes))])
    return service.RecordActivityTaskHeartbeatRequest(namespace="default", details=details)


@pytest.mark.rotating
async def test_calls_without_a_request(site: Site) -> None:
    """A call without a valid key ends at once, also if its request never arrives; one with a key after some seconds."""
    async with (
        site.caller(None) as nobody,
        site.caller("mzn_0123_unknown") as stranger,
        site.caller(site.key(site.machine("m1"))) as known,
    ):
        ended = await asyncio.gather(*map(_without_request, (nobody, stranger, known)))
    assert [code for code, _ in ended] == [
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ]
    assert "did not arrive within 5 seconds" in ended[2][1]


async def test_sizes_and_bytes(site: Site) -> None:
    """Each method has a largest size, and each machine a number of bytes for each second."""
    denied = grpc.StatusCode.PERMISSION_DENIED  # The heartbeats below have no task token.
    async with site.caller(site.key(site.machine("m1"))) as caller, site.caller(site.key(site.machine("m2"))) as other:
        request = service.SignalWorkflowExecutionRequest(namespace="default", signal_name="x" * (64 << 10))
        code, message = await caller.refusal(request)
        assert (code, "must have at most 65536" in message) == (EXHAUSTED, True), message
        assert (await caller.refusal(_heartbeat(600 << 10)))[0] is EXHAUSTED
        assert (await caller.refusal(_heartbeat(500 << 10)))[0] is denied
        for _ in range(60):
            code, message = await caller.refusal(_heartbeat(500 << 10))
            if code is EXHAUSTED:
                break
        assert (code, "bytes per second" in message) == (EXHAUSTED, True), message
        assert (await other.refusal(_heartbeat(500 << 10)))[0] is denied


def _keys(engine: Engine, count: int) -> list[str]:
    """Returns new keys, each of another machine."""
    made = [new_api_key() for _ in range(count)]
    with transaction(engine) as session:
        session.add_all(
            ApiKey(id=key_id, sha256=sha256, role="machine", machine=f"r/c/m{n}")
            for n, (key_id, _, sha256) in enumerate(made)
        )
    return [key for _, key, _ in made]


async def _exhaust(sessions: Sessions) -> None:
    """Sends wrong keys until the address has no lookups left."""
    for n in range(50):
        with pytest.raises(Refused, match="unknown"):
            await sessions.of_call(f"Bearer mzn_{n}_wrong", HERE)
    with pytest.raises(Refused, match="too many unknown keys"):
        await sessions.of_call("Bearer mzn_50_wrong", HERE)


async def test_lookups_of_many_machines_behind_one_address(database: Engine) -> None:
    """Wrong keys exhaust the lookups of their address, but do not exclude the keys that were valid before."""
    sessions = Sessions(database, clock=lambda: 0.0)

    async def accepted(keys: list[str]) -> list[MachineSession]:
        return [await sessions.of_call(f"Bearer {key}", HERE) for key in keys]

    try:
        assert len(await accepted(_keys(database, 60))) == 60, "lookups that succeed are not counted"
        early = _keys(database, 3)
        await sessions.list_keys()
        late = _keys(database, 1)
        with transaction(database) as session:
            session.execute(update(ApiKey).where(ApiKey.id == early[2].split("_")[1]).values(revoked_at=func.now()))
        await _exhaust(sessions)
        assert [one.machine for one in await accepted(early[:2])] == ["r/c/m0", "r/c/m1"]
        for key, words in ((early[2], "revoked"), (early[2], "too many"), (late[0], "too many")):
            with pytest.raises(Refused, match=words):
                await sessions.of_call(f"Bearer {key}", HERE)
        assert (await sessions.of_call(f"Bearer {late[0]}", "192.0.2.2")).machine == "r/c/m0"
    finally:
        sessions.close()


async def _is_open(reader: asyncio.StreamReader) -> bool:
    """Returns whether the other side has left a connection open for the time of several looks."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(4):
            return await reader.read(1) != b""
    return True


@pytest.mark.rotating
async def test_connections_of_one_address(lab: Lab, database: Engine, tmp_path: Path) -> None:
    """The newest connections of an address beyond the limit are ended; calls and other addresses go on."""
    metrics = free_port()
    options = {"connections_per_address": 6, "metrics": ("127.0.0.1", metrics)}
    async with Site.open(lab, database, tmp_path, **options) as site, contextlib.AsyncExitStack() as stack:
        machine = site.machine("m1")
        agent = await stack.enter_async_context(site.caller(site.key(machine)))
        polling = asyncio.create_task(agent.poll(machine, timeout_s=60))
        await until_async(lambda: _metric(metrics, "calls_in_progress", kind="poll") == 1)
        await until_async(lambda: _metric(metrics, "connections") == 1)

        async def connect(source: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port, local_addr=(source, 0))
            stack.callback(writer.close)
            return reader

        others = [await connect("127.0.0.2") for _ in range(6)]
        same = [await connect("127.0.0.1") for _ in range(20)]
        found = await asyncio.gather(*map(_is_open, [*others, *same]))
        assert all(found[:6]), "those of another address stay"
        assert sum(found[6:]) == 5, "six with that of the agent"
        assert _metric(metrics, "connections_ended_total") == 15
        assert (_metric(metrics, "connections"), _metric(metrics, "addresses")) == (12, 2)
        assert not polling.done()
        assert (await agent.call(service.GetSystemInfoRequest())).server_version
        polling.cancel()


async def test_metrics(lab: Lab, database: Engine, tmp_path: Path) -> None:
    """Calls are counted by method and code, also refused ones; names that callers choose are no labels."""
    metrics = free_port()
    async with Site.open(lab, database, tmp_path, metrics=("127.0.0.1", metrics)) as site:
        machine = site.machine("m1")
        async with site.caller(site.key(machine)) as known, site.caller("mzn_0123_unknown") as stranger:
            for _ in range(2):
                await known.call(service.GetSystemInfoRequest())
            await known.refusal(service.DescribeNamespaceRequest(namespace="other"))
            await known.refusal(service.ListNamespacesRequest())
            await stranger.refusal(service.GetSystemInfoRequest())
            assert _metric(metrics, "keys") == 1
        # A call is counted after its answer.
        for value, name, labels in (
            (2, "calls_total", {"method": "GetSystemInfo", "code": "OK"}),
            (1, "calls_total", {"method": "DescribeNamespace", "code": "PERMISSION_DENIED"}),
            (1, "calls_total", {"method": "other", "code": "PERMISSION_DENIED"}),
            (1, "calls_total", {"method": "other", "code": "UNAUTHENTICATED"}),
            (2, "temporal_seconds_count", {"method": "GetSystemInfo"}),
        ):
            await until_async(partial(_metric_is, metrics, value, name, **labels))
        assert 0 <= _metric(metrics, "keys_check_age_seconds") < 60
    with pytest.raises(OSError, match="refused"):
        _metric(metrics, "keys")


def _metric_is(port: int, value: float, name: str, **labels: str) -> bool:
    return _metric(port, name, **labels) == value


def _metric(port: int, name: str, **labels: str) -> float:
    """Returns the value of a metric of the gateway, as Prometheus reads it; 0: it has no such sample yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    wanted = f"mizzen_gateway_{name}"
    return float(
        sum(one.value for family in families for one in family.samples if one.name == wanted and one.labels == labels)
    )
