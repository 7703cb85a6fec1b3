"""Event streams: each event exactly once and in order, for any order of commits and after reconnections."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from api.auth import Caller, Role
from api.streams import events as streams
from api.streams import hub
from api.streams.hub import Hub
from domain.phases import Phase
from infra.config.services import LimitSettings
from infra.db import events
from infra.db.events import Cursor
from tests.api.world import ApiWorld, awarded

Serve = Callable[[ApiWorld], str]


@dataclass(frozen=True)
class Received:
    """An event that a client received."""

    id: str
    kind: str
    data: dict[str, Any]


async def parsed(lines: AsyncIterator[str]) -> AsyncIterator[Received]:
    """Parses the events of a stream; ignores comments."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Received(fields["id"], fields["event"], json.loads(fields["data"]))
            fields = {}
        else:
            fields = {}


@asynccontextmanager
async def following(base: str, world: ApiWorld, path: str, last: str | None = None, key: str = "operator") -> Any:
    """Opens a stream; yields its events."""
    headers = world.headers(key) | ({"last-event-id": last} if last else {})
    async with (
        httpx.AsyncClient(base_url=base, headers=headers, timeout=60) as client,
        client.stream("GET", path) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield parsed(answer.aiter_lines())


async def present(
    world: ApiWorld, path: str, key: str = "operator", after: str | None = None, **headers: str
) -> list[Received]:
    """Returns the events so far, without following the stream."""
    params = {"follow": "false"} | ({"after": after} if after else {})
    async with world.client(key) as client:
        answer = await client.get(path, params=params, headers=headers)
    assert answer.status_code == 200, answer.text

    async def lines() -> AsyncIterator[str]:
        for line in answer.text.split("\n"):
            yield line

    return [event async for event in parsed(lines())]


async def test_events_of_a_workload(world: ApiWorld) -> None:
    """A workload's events arrive in order, with kind, reason and id, and can be read after a given id."""
    id_, other = world.add_workload(), world.add_workload()
    world.set_phase(id_, Phase.PLACING, reason=awarded())
    world.set_phase(other, Phase.PLACING)
    world.set_phase(id_, Phase.PROVISIONING)
    found = await present(world, f"/v1/workloads/{id_}/events")
    assert [e.kind for e in found] == ["workload.placing", "workload.provisioning"]
    assert found[0].data["workload"] == id_
    assert found[0].data["reason"]["code"] == "awarded"
    assert [e.data["id"] for e in found] == [e.id for e in found]
    assert [e.kind for e in await present(world, f"/v1/workloads/{id_}/events", **{"last-event-id": found[0].id})] == [
        "workload.provisioning"
    ]
    assert await present(world, f"/v1/workloads/{id_}/events", **{"last-event-id": found[1].id}) == []
    assert len(await present(world, "/v1/events")) == 3


async def test_events_are_the_tenants_own(world: ApiWorld) -> None:
    """A key of a tenant gets only the events of that tenant, and none of machines."""
    mine, other = world.add_workload(), world.add_workload(tenant="speech")
    for id_ in (mine, other):
        world.set_phase(id_, Phase.PLACING)
    with world.session() as session:
        events.record(session, "machine.lost", machine="north/alpha/m1", region="north")
    assert [e.data["workload"] for e in await present(world, "/v1/events", "vision")] == [mine]
    assert len(await present(world, "/v1/events", "auditor")) == 3


async def test_more_events_than_a_page(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """All past events are sent, for any page size and also if the last page is full."""
    id_ = world.add_workload()
    with world.session() as session:
        for number in range(20):
            events.record(session, f"workload.n{number}", workload=id_, tenant="vision")
    for page in (1, 4, 5, 19, 20, 21):
        monkeypatch.setattr(streams, "_PAGE", page)
        found = await present(world, f"/v1/workloads/{id_}/events")
        assert [e.kind for e in found] == [f"workload.n{number}" for number in range(20)]


@pytest.mark.parametrize("id_", ["", "x", "1", "1-", "-1", "1-2-3", "-1-2", "1-x", "9" * 30 + "-1", "١-١", "now"])
async def test_malformed_last_event_id(shared_world: ApiWorld, id_: str) -> None:
    """A malformed Last-Event-ID is an error; it does not restart the stream."""
    async with shared_world.client() as client:
        for path in ("/v1/events", f"/v1/workloads/{shared_world.add_workload()}/events"):
            answer = await client.get(path, headers=[(b"last-event-id", id_.encode())])
            assert (answer.status_code, answer.json()["type"]) == (400, "urn:mizzen:problem:malformed-request")


async def test_begin_at_the_present(world: ApiWorld) -> None:
    """`after=now` skips past events, and `after` with an id is equivalent to Last-Event-ID."""
    id_ = world.add_workload()
    world.set_phase(id_, Phase.PLACING)
    assert await present(world, "/v1/events", after="now") == []
    (first,) = await present(world, "/v1/events")
    world.set_phase(id_, Phase.PROVISIONING)
    assert [e.kind for e in await present(world, "/v1/events", after=first.id)] == ["workload.provisioning"]
    async with world.client() as client:
        assert (await client.get("/v1/events?after=yesterday")).status_code == 400


async def test_stream_of_a_workload_ends_with_it(world: ApiWorld, serve: Serve) -> None:
    """A followed stream sends events as they occur, and ends after the workload's last event."""
    base, id_ = serve(world), world.add_workload()
    world.set_phase(id_, Phase.PLACING)
    kinds = []
    coming = [Phase.PROVISIONING, Phase.RUNNING, Phase.SUCCEEDED]
    async with following(base, world, f"/v1/workloads/{id_}/events", key="vision") as stream:
        async for event in stream:
            kinds.append(event.kind)
            if coming:
                world.set_phase(id_, coming.pop(0))
    assert kinds == ["workload.placing", "workload.provisioning", "workload.running", "workload.succeeded"]
    async with following(base, world, f"/v1/workloads/{id_}/events", event.id) as stream:
        assert [e async for e in stream] == []


async def test_last_event_is_awaited_while_an_older_transaction_runs(world: ApiWorld, serve: Serve) -> None:
    """The stream of an ended workload stays open until an older transaction ends, and then sends the last event."""
    base, id_ = serve(world), world.add_workload()
    with world.engine.connect() as old, old.begin():
        old.execute(text("select pg_current_xact_id()"))
        world.set_phase(id_, Phase.CANCELLED)
        assert await present(world, f"/v1/workloads/{id_}/events") == []
        async with following(base, world, f"/v1/workloads/{id_}/events") as stream:
            old.commit()
            assert [e.kind async for e in stream] == ["workload.cancelled"]


def _write(world: ApiWorld, writer: int, count: int) -> None:
    """Writes events in transactions that overlap with other writers and commit out of order; a fifth is rolled back."""
    chance = random.Random(writer)
    for number in range(count):
        with world.session() as session:
            events.record(session, f"w{writer}.n{number}", workload=f"wl-{writer}", tenant="vision")
            session.execute(text("select pg_sleep(:s)"), {"s": chance.random() * 0.02})
            if chance.random() < 0.2:
                session.rollback()


async def test_every_event_once_and_in_order_over_reconnections(world: ApiWorld, serve: Serve) -> None:
    """A client that reconnects at random gets each committed event exactly once and in order."""
    base = serve(world)
    writers = [threading.Thread(target=_write, args=(world, writer, 40)) for writer in range(6)]
    chance = random.Random(1)
    seen: list[Received] = []
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        async with following(base, world, "/v1/events", seen[-1].id if seen else None) as stream:
            for _ in range(chance.randrange(1, 25)):
                seen.append(await anext(stream))
                if not any(thread.is_alive() for thread in writers):
                    break
    for thread in writers:
        thread.join()
    seen += await present(world, "/v1/events", **{"last-event-id": seen[-1].id})
    cursors = [Cursor.parse(event.id) for event in seen]
    assert cursors == sorted(set(cursors))
    with world.session() as session:
        committed = session.scalars(text("select kind from event order by txid, id")).all()
    assert [event.kind for event in seen] == list(committed)
    assert 100 < len(committed) < 240


_CALLER = Caller("k", Role.OPERATOR, None, "")


async def test_only_those_concerned_are_woken(world: ApiWorld) -> None:
    """An event wakes only the followers of its workload, of its tenant and of all events."""
    own = Hub(world.engine, LimitSettings())
    with (
        own.register(_CALLER, "wl-a", waits=True) as same,
        own.register(_CALLER, "wl-b", waits=True) as other,
        own.register(_CALLER, None, "vision", waits=True) as tenant,
        own.register(_CALLER, None, "speech", waits=True) as stranger,
        own.register(_CALLER, None, waits=True) as everyone,
    ):
        followers = (same, other, tenant, stranger, everyone)
        for follower in followers:  # the listener wakes all followers once when it starts
            assert await follower.wait(30)
        with world.session() as session:
            events.record(session, "workload.running", workload="wl-a", tenant="vision")
        for follower in (same, tenant, everyone):
            assert await follower.wait(30)
        assert not other.due.is_set()
        assert not stranger.due.is_set()
        assert own.followers == 5
    assert own.followers == 0
    await own.aclose()


async def test_nothing_is_read_for_those_who_know_already(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """While every follower has still to look, the log is not read; what came meanwhile is not lost."""
    reads: list[Cursor] = []
    read = events.concerned_after

    def counted(session: Session, cursor: Cursor, *, limit: int) -> Any:
        reads.append(cursor)
        return read(session, cursor, limit=limit)

    monkeypatch.setattr(events, "concerned_after", counted)
    own = Hub(world.engine, LimitSettings())
    with own.register(_CALLER, None, waits=True) as follower:
        assert await follower.wait(30)
        with world.session() as session:
            events.record(session, "workload.running", workload="wl-a", tenant="vision")
        while not follower.due.is_set():
            await asyncio.sleep(0.01)
        before = len(reads)
        for _ in range(20):
            with world.session() as session:
                events.record(session, "workload.running", workload="wl-a", tenant="vision")
            await follower.pause(0.1)
        assert len(reads) <= before + 1
        assert await follower.wait(0.0) and follower.was_told
        with world.session() as session:
            events.record(session, "workload.running", workload="wl-b", tenant="vision")
        assert await follower.wait(30) and follower.was_told
    await own.aclose()


async def test_stream_ends_with_its_key(world: ApiWorld, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream ends when its key is revoked; streams of other keys continue."""
    monkeypatch.setattr(hub, "KEYS_S", 0.0)
    base, id_ = serve(world), world.add_workload()
    async with (
        following(base, world, "/v1/events", key="vision") as stream,
        following(base, world, f"/v1/workloads/{id_}/events", key="operator") as other,
    ):
        with world.session() as session:
            session.connection().exec_driver_sql("update api_key set revoked_at = now() where id = 'key-vision'")
        assert [e async for e in stream] == []
        world.set_phase(id_, Phase.CANCELLED)
        assert [e.kind async for e in other] == ["workload.cancelled"]


async def test_followers_are_bounded(world: ApiWorld, serve: Serve) -> None:
    """A process refuses streams over its limit with 503, and accepts a new one after another one has ended."""
    world.app.state.mizzen.hub = Hub(world.engine, LimitSettings(streams=1))
    base = serve(world)
    async with httpx.AsyncClient(base_url=base, headers=world.headers("operator"), timeout=60) as client:
        async with following(base, world, "/v1/events"):
            answer = await client.get("/v1/events")
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:mizzen:problem:too-many-followers")
            assert (await client.get("/v1/events?follow=false")).status_code == 200
        while True:
            async with client.stream("GET", "/v1/events") as stream:
                if stream.status_code == 200:
                    break


async def test_listener_that_lost_its_connection(world: ApiWorld, serve: Serve) -> None:
    """A stream continues after the listener's database connection is lost."""
    base, id_ = serve(world), world.add_workload()
    async with following(base, world, f"/v1/workloads/{id_}/events") as stream:
        world.set_phase(id_, Phase.PLACING)
        assert (await anext(stream)).kind == "workload.placing"
        with world.session() as session:
            session.execute(
                text("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'mizzen-api%'")
            )
        world.set_phase(id_, Phase.CANCELLED)
        assert [e.kind async for e in stream] == ["workload.cancelled"]


async def test_heartbeats(world: ApiWorld, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without events sends comments as heartbeats."""
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.1)
    base = serve(world)
    async with (
        httpx.AsyncClient(base_url=base, headers=world.headers("operator"), timeout=60) as client,
        client.stream("GET", "/v1/events") as answer,
    ):
        lines = [line async for line, _ in _first(answer.aiter_lines(), 6)]
    assert lines == ["retry: 1000", "", ": still here", "", ": still here", ""]


async def _first(lines: AsyncIterator[str], count: int) -> AsyncIterator[tuple[str, int]]:
    number = 0
    async for line in lines:
        yield line, number
        number += 1
        if number == count:
            return
