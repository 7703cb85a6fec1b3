"""Logs of all elements of an array over the API: selected, in order, followed, and past stores that do not answer."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from api.streams import array_logs, store_reads
from domain.ids import element_id
from domain.phases import Phase
from infra.db.array_rows import take_element
from infra.db.models import Workload
from tests.api.calls import T0
from tests.api.documents import job
from tests.api.test_logs import Shipper, read
from tests.api.world import ApiWorld


async def _array(world: ApiWorld, tasks: int = 1) -> str:
    """Submits an array of ten elements; returns its id."""
    body = {**job(tasks=tasks), "name": "sweep", "array": "0-9"}
    async with world.client("vision") as client:
        answer = await client.post("/v1/workloads", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def _start(world: ApiWorld, array: str, index: int, region: str = "north", attempt: int = 1, **columns: Any) -> Shipper:
    """Places an attempt of an element, which holds no slot; returns what uploads its output."""
    element = element_id(array, index)
    with world.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        if session.get(Workload, element) is None:
            take_element(session, array, index, index)
    machine = {"north": "north/alpha/m1", "south": "south/beta/m1"}[region]
    world.add_attempt(element, attempt, machine, 0, **columns)
    return Shipper(world.buckets[region], element, attempt)


def _end(world: ApiWorld, array: str, index: int, attempt: int = 1) -> None:
    with world.session() as session:
        statement = "update attempt set released_at = now() where workload = %s and attempt = %s"
        session.connection().exec_driver_sql(statement, (element_id(array, index), attempt))


async def test_all_elements_in_order(world: ApiWorld) -> None:
    """Lines begin with the element, in the order of the indexes. Elements without an attempt have no lines."""
    array = await _array(world)
    _start(world, array, 7).ship("seven\n").ship("of ten\n").end()
    _start(world, array, 2, "south", released_at=T0).ship("two").end()
    _start(world, array, 3, released_at=T0).ship("first\n").end()
    _start(world, array, 3, attempt=2).ship("second try\n")
    assert await read(world, array) == "sweep/2: two\nsweep/3#2: second try\nsweep/7: seven\nsweep/7: of ten\n"
    assert await read(world, array, tail=1) == "sweep/2: two\nsweep/3#2: second try\nsweep/7: of ten\n"
    assert await read(world, array, contains="o") == "sweep/2: two\nsweep/3#2: second try\nsweep/7: of ten\n"
    async with world.client() as client:
        answer = await client.get(f"/v1/workloads/{array}/logs", params={"attempt": 1})
        assert (answer.status_code, "one of its elements" in answer.text) == (422, True)


async def test_lines_after_a_time(world: ApiWorld) -> None:
    """Segments before the time are left out, and so are elements that ended long before it."""
    array = await _array(world)
    shipper = _start(world, array, 0).ship("old\n")
    shipper.at_ms = int(T0.timestamp() * 1000) + 1
    shipper.ship("new\n").end()
    _start(world, array, 1, released_at=T0.replace(year=T0.year - 1)).ship("older\n").end()
    assert await read(world, array, since=T0.isoformat()) == "sweep/0: new\n"
    assert await read(world, element_id(array, 0), since=T0.isoformat()) == "new\n"


async def test_gangs_as_elements(world: ApiWorld) -> None:
    """If an element has several tasks, the line names the task, too."""
    array = await _array(world, tasks=2)
    _start(world, array, 1).ship("a\n")
    Shipper(world.buckets["north"], element_id(array, 1), task=1).ship("b\n").skip(5).ship("c\n")
    lines = (await read(world, array)).splitlines()
    missing = "--- sweep/1 trainer/1: 5 bytes of the log are missing here"
    assert lines == ["sweep/1 trainer/0: a", "sweep/1 trainer/1: b", missing, "sweep/1 trainer/1: c"]
    assert await read(world, array, task=0) == "sweep/1: a\n"


async def test_elements_that_have_just_ended(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their late output is waited for, but all elements without an end marker share one limited time."""
    monkeypatch.setattr(array_logs, "LATE_S", 3.0)
    array = await _array(world)
    shipper = _start(world, array, 0).ship("loss 1\n")
    for index in (1, 2):
        _start(world, array, index).ship("lost\n")
    for index in range(3):
        _end(world, array, index)
    late = threading.Timer(0.5, lambda: shipper.ship("saved\n").end())
    late.start()
    try:
        assert await read(world, array) == "sweep/0: loss 1\nsweep/0: saved\nsweep/1: lost\nsweep/2: lost\n"
    finally:
        late.join()


async def test_a_store_that_does_not_answer(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements are named and skipped. Later requests do not wait for it again, and other stores are read."""
    monkeypatch.setattr(store_reads, "ANSWER_S", 0.5)
    array = await _array(world)
    for index in range(10):
        _start(world, array, index, "south" if index in (1, 4, 5, 9) else "north").ship("hello\n")
    answer, calls, state = threading.Event(), 0, world.app.state.mizzen

    class Silent:
        def list(self, prefix: str, *, after: str = "") -> Any:
            nonlocal calls
            calls += 1
            answer.wait(60)
            return iter(())

    opened = state.store
    monkeypatch.setattr(state, "store", lambda url: Silent() if url.endswith("south") else opened(url))
    try:
        for _ in range(3):
            lines = (await read(world, array)).splitlines()
            assert [line for line in lines if not line.startswith("---")] == [
                f"sweep/{index}: hello" for index in (0, 2, 3, 6, 7, 8)
            ]
            named, count = (line for line in lines if line.startswith("---"))
            assert "the store of region south cannot be read (TimeoutError): its elements are skipped" in named
            assert count == "--- 3 more elements in region south were skipped"
        assert calls <= 4, "each request left threads behind"
    finally:
        answer.set()


async def test_following(world: ApiWorld, serve: Callable[[ApiWorld], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower gets each line once: of elements that run, start later, are tried again, and of late uploads."""
    monkeypatch.setattr(array_logs, "_POLL_S", 0.1)
    monkeypatch.setattr(array_logs, "LATE_S", 1.0)
    array, base = await _array(world), serve(world)
    running = _start(world, array, 0).ship("a\n")
    lost = _start(world, array, 1, released_at=T0).ship("x")
    received = []
    async with (
        httpx.AsyncClient(base_url=base, headers=world.headers("vision"), timeout=60) as client,
        client.stream("GET", f"/v1/workloads/{array}/logs", params={"follow": True}) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            received.append(line)
            if line == "sweep/1: x":
                running.ship("b\n")
            if line == "sweep/0: b":
                _start(world, array, 5).ship("short\n").end()
                _end(world, array, 5)
            if line == "sweep/5: short":
                running.ship("c\n").end()
                _end(world, array, 0)
                _start(world, array, 0, attempt=2).ship("again\n")
            if line == "sweep/0#2: again":
                _end(world, array, 0, attempt=2)
                world.set_phase(array, Phase.FAILED)
    assert sorted(received) == sorted(
        ["sweep/0: a", "sweep/1: x", "sweep/0: b", "sweep/5: short", "sweep/0: c", "sweep/0#2: again"]
    )
    assert lost is not None


async def test_more_elements_than_are_followed_at_a_time(
    world: ApiWorld, serve: Callable[[ApiWorld], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other elements are followed as soon as there is room, from their first line."""
    monkeypatch.setattr(array_logs, "_POLL_S", 0.1)
    monkeypatch.setattr(array_logs, "MOST_FOLLOWED", 2)
    array, base = await _array(world), serve(world)
    shippers = [_start(world, array, index).ship(f"{index}\n") for index in range(5)]
    received = []
    async with (
        httpx.AsyncClient(base_url=base, headers=world.headers("vision"), timeout=60) as client,
        client.stream("GET", f"/v1/workloads/{array}/logs", params={"follow": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            received.append(line)
            index = int(line.rpartition(" ")[2])
            shippers[index].end()
            _end(world, array, index)
            if len(received) == 5:
                world.set_phase(array, Phase.SUCCEEDED)
    assert received == [f"sweep/{index}: {index}" for index in range(5)]
