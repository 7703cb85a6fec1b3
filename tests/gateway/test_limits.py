"""Limits of the gateway: calls without a key or a request, sizes of requests, bytes, and lookups of keys."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from sqlalchemy import Engine, func, update
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.workflowservice import v1 as service

from gateway.keys import Session, Sessions
from gateway.methods import SERVICE
from gateway.refusals import Refused
from infra.db.models import ApiKey
from infra.db.session import transaction
from infra.keys import new_api_key
from tests.gateway.site import Caller, Site

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

    async def accepted(keys: list[str]) -> list[Session]:
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
