"""Logs over the API: each line exactly once, from the segments that agents upload, with tails, follows and attempts."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from api.streams import logs
from api.streams.task_log import MAX_LINE_BYTES, TaskLog
from domain.ids import log_prefix
from domain.log_segments import Segment, TaskOutput
from domain.phases import Phase
from infra.db.models import Attempt, Workload
from mizzen.objects import ObjectStore
from tests.api.calls import T0
from tests.api.world import ApiWorld

Serve = Callable[[ApiWorld], str]


class Shipper:
    """Uploads the output of one task in segments, as an agent does."""

    def __init__(self, store: ObjectStore, workload: str, attempt: int = 1, task: int = 0) -> None:
        self._store = store
        self._prefix = log_prefix(workload, attempt, "trainer", task)
        self._offset = 0
        self.at_ms = 1
        self.output = TaskOutput.BOTH

    def ship(self, text: str | bytes) -> "Shipper":
        """Uploads a segment."""
        body = text.encode() if isinstance(text, str) else text
        self._store.put(self._prefix + Segment(self._offset, self.at_ms, self.output).name, body)
        self._offset += len(body)
        return self

    def skip(self, size: int) -> "Shipper":
        """Skips `size` bytes, as if a segment were lost."""
        self._offset += size
        return self

    def end(self) -> None:
        """Uploads the marker of the log's end."""
        self._store.put(f"{self._prefix}end", b"")


def placed(world: ApiWorld, attempt: int = 1, slots: int = 0b11, **columns: Any) -> str:
    """Adds a running workload with two tasks in region north; returns its id."""
    id_ = world.add_workload(Phase.RUNNING)
    world.add_attempt(id_, attempt, "north/alpha/m1", slots, **columns)
    return id_


async def read(world: ApiWorld, workload: str, key: str = "operator", **params: Any) -> str:
    async with world.client(key) as client:
        answer = await client.get(f"/v1/workloads/{workload}/logs", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer.text


async def test_lines_over_segments(world: ApiWorld) -> None:
    """A line that spans two segments is returned as one line; the last line may lack a line end."""
    id_ = placed(world)
    Shipper(world.buckets["north"], id_).ship("one\ntw").ship("o\n").ship("thr").ship("ee")
    assert await read(world, id_, task=0) == "one\ntwo\nthree\n"


async def test_several_tasks_take_turns_and_are_named(world: ApiWorld) -> None:
    """With several tasks each line has its task as a prefix, and the segments of the tasks are interleaved."""
    id_ = placed(world)
    Shipper(world.buckets["north"], id_, task=0).ship("a\nb\n").ship("c\n").end()
    Shipper(world.buckets["north"], id_, task=1).ship("x\n").ship("y\n").end()
    assert await read(world, id_) == (
        "trainer/0| a\ntrainer/0| b\ntrainer/1| x\ntrainer/0| c\ntrainer/1| y\n"
    )  # fmt: skip
    assert await read(world, id_, job="trainer", task=1) == "x\ny\n"


@pytest.mark.parametrize("tail", [0, 1, 2, 3, 4, 5, 100])
async def test_tail(shared_world: ApiWorld, tail: int) -> None:
    """`tail` returns the last lines, for any boundaries of segments."""
    lines = ["first", "second", "third", "fourth"]
    text = "".join(f"{line}\n" for line in lines)
    for cut in range(1, len(text), 5):
        id_ = placed(shared_world, slots=0)
        Shipper(shared_world.buckets["north"], id_).ship(text[:cut]).ship(text[cut:]).end()
        expected = lines[len(lines) - min(tail, len(lines)) :]
        assert (await read(shared_world, id_, task=0, tail=tail)).splitlines() == expected


async def test_output_that_is_no_text(world: ApiWorld) -> None:
    """Invalid UTF-8 is replaced, and a character that spans two segments is decoded."""
    id_ = placed(world)
    snowman = "☃".encode()
    Shipper(world.buckets["north"], id_).ship(b"\xff\x00ok\n" + snowman[:1]).ship(snowman[1:] + b"\n").end()
    assert await read(world, id_, task=0) == "\ufffd\0ok\n☃\n"


async def test_missing_segments_are_told_of(world: ApiWorld) -> None:
    """A missing segment is reported in the log with its number of bytes."""
    id_ = placed(world)
    Shipper(world.buckets["north"], id_).ship("one\n").skip(10).ship("two\n").end()
    assert await read(world, id_, task=0) == "one\n--- 10 bytes of the log are missing here\ntwo\n"


def test_segments_that_were_shipped_again(world: ApiWorld) -> None:
    """If a segment overlaps the previous one, only its new bytes are returned."""
    store, prefix = world.buckets["north"], "logs/x/"
    store.put(prefix + Segment(0, 1).name, b"one\ntwo\n")
    store.put(prefix + Segment(4, 1).name, b"two\nthree\n")
    store.put(f"{prefix}other", b"")
    found = TaskLog(store, prefix)
    assert [line for lines in found.segments() for line in lines] == [b"one", b"two", b"three"]


def test_lines_without_end_are_cut(world: ApiWorld) -> None:
    """A line over the maximum length is returned in pieces."""
    store, prefix = world.buckets["north"], "logs/x/"
    store.put(prefix + Segment(0, 1).name, b"x" * (2 * MAX_LINE_BYTES + 5))
    found = TaskLog(store, prefix)
    sizes = [len(line) for lines in found.segments() for line in lines]
    assert sizes == [MAX_LINE_BYTES, MAX_LINE_BYTES]
    assert found.flush() == [b"x" * 5]


async def test_other_attempts(world: ApiWorld) -> None:
    """The newest attempt is the default; older attempts can be read by number, also from other regions."""
    id_ = placed(world, released_at=T0)
    world.add_attempt(id_, 2, "south/beta/m1", 0b11)
    Shipper(world.buckets["north"], id_, 1).ship("old\n").end()
    Shipper(world.buckets["south"], id_, 2).ship("new\n")
    assert await read(world, id_, task=0) == "new\n"
    assert await read(world, id_, task=0, attempt=1) == "old\n"
    assert await read(world, id_, task=0, attempt=1, follow=True) == "old\n"


async def test_workload_that_was_never_placed(world: ApiWorld) -> None:
    """A workload without an attempt has an empty log."""
    assert await read(world, world.add_workload()) == ""


async def test_stdout_and_stderr_apart(world: ApiWorld) -> None:
    """One of the outputs is selected, and a line is joined although the other output lies between its parts."""
    id_ = placed(world)
    with world.session() as session:
        row = session.get_one(Workload, id_)
        row.spec = {**row.spec, "jobs": [{**job, "output": "separate"} for job in row.spec["jobs"]]}
    shipper = Shipper(world.buckets["north"], id_)
    for output, text in (
        (TaskOutput.STDOUT, "a\nb"),
        (TaskOutput.STDERR, "bad\n"),
        (TaskOutput.STDOUT, "c\nd"),
        (TaskOutput.STDERR, "e"),
    ):
        shipper.output = output
        shipper.ship(text)
    shipper.end()
    assert await read(world, id_, task=0) == "a\nbad\nbc\nd\ne\n"
    assert await read(world, id_, task=0, output="stdout") == "a\nbc\nd\n"
    assert await read(world, id_, task=0, output="stderr", tail=1) == "e\n"


BAD: list[tuple[dict[str, Any], int]] = [
    ({"job": "other"}, 422), ({"task": 2}, 422), ({"task": -1}, 422), ({"task": 10**30}, 422), ({"task": "x"}, 422),
    ({"attempt": 0}, 422), ({"attempt": 9}, 404), ({"attempt": 10**30}, 422), ({"tail": -1}, 422),
    ({"output": "stderr"}, 422), ({"output": "both"}, 422), ({"since": "2026-01-01T00:00:00"}, 422),
    ({"tail": 10**9}, 422), ({"follow": "perhaps"}, 422),
]  # fmt: skip


@pytest.mark.parametrize(("params", "status"), BAD, ids=[str(b[0]) for b in BAD])
async def test_bad_selections(shared_world: ApiWorld, params: dict[str, Any], status: int) -> None:
    """Invalid selections return 422; an attempt that does not exist returns 404."""
    id_ = placed(shared_world, slots=0)
    async with shared_world.client() as client:
        answer = await client.get(f"/v1/workloads/{id_}/logs", params=params)
    assert answer.status_code == status


async def test_too_many_tasks_at_once(world: ApiWorld) -> None:
    """For a large gang, a request without a task is an error; the log of one task can be read."""
    id_ = world.add_workload(tasks=500)
    async with world.client() as client:
        answer = await client.get(f"/v1/workloads/{id_}/logs")
        assert (answer.status_code, "500 tasks" in answer.json()["detail"]) == (422, True)
        assert (await client.get(f"/v1/workloads/{id_}/logs?task=499")).status_code == 200


async def test_all_tasks_of_an_elastic_job_with_a_large_maximum(world: ApiWorld) -> None:
    """An elastic job of 1 to 500 tasks can be read while its attempt has few; there is an error if it has too many."""
    id_ = placed(world)
    with world.session() as session:
        row = session.get_one(Workload, id_, with_for_update=True)
        row.spec = row.spec | {"jobs": [row.spec["jobs"][0] | {"tasks": 1, "most_tasks": 500}]}
    Shipper(world.buckets["north"], id_, task=1).ship("x\n").end()
    assert await read(world, id_) == "trainer/1| x\n"
    with world.session() as session:
        own = session.get_one(Attempt, (id_, 1))
        own.plan = {"jobs": [own.plan["jobs"][0] | {"machines": [("north/alpha/m1", 65)]}]}
    async with world.client() as client:
        answer = await client.get(f"/v1/workloads/{id_}/logs")
    assert (answer.status_code, "65 tasks" in answer.json()["detail"]) == (422, True)


async def test_logs_that_were_deleted(world: ApiWorld) -> None:
    """Logs that have expired return 410, not an empty text."""
    id_ = world.add_workload(Phase.SUCCEEDED, expired_at=T0)
    async with world.client() as client:
        answer = await client.get(f"/v1/workloads/{id_}/logs")
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:mizzen:problem:gone")


async def test_store_that_does_not_answer(world: ApiWorld) -> None:
    """If the bucket cannot be read, the response is 503, not an empty log."""
    id_ = placed(world)

    class Broken:
        def list(self, prefix: str, *, after: str = "") -> Any:
            raise PermissionError(prefix)

    world.app.state.mizzen.store = lambda url: Broken()
    async with world.client() as client:
        answer = await client.get(f"/v1/workloads/{id_}/logs")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:mizzen:problem:storage-unavailable")


def _run(world: ApiWorld, id_: str) -> None:
    """Simulates two attempts that write output in pieces: the first one is released, the second one succeeds."""
    chance = random.Random(5)

    def pause() -> None:
        time.sleep(chance.random() * 0.1)

    def output(store: ObjectStore, attempt: int) -> list[Shipper]:
        shippers = [Shipper(store, id_, attempt, task) for task in (0, 1)]
        for number in range(20):
            shippers[number % 2].ship(f"attempt {attempt} li")
            pause()
            shippers[number % 2].ship(f"ne {number}\n")
        return shippers

    world.add_attempt(id_, 1, "north/alpha/m1", 0b11)
    world.set_phase(id_, Phase.RUNNING)
    first, _ = output(world.buckets["north"], 1)
    first.end()
    with world.session() as session:
        session.connection().exec_driver_sql("update attempt set released_at = now()")
        session.connection().exec_driver_sql("update allocation set released_at = now()")
    world.set_phase(id_, Phase.PENDING)
    pause()
    world.add_attempt(id_, 2, "south/beta/m1", 0b11)
    world.set_phase(id_, Phase.RUNNING)
    second = output(world.buckets["south"], 2)
    world.set_phase(id_, Phase.SUCCEEDED)
    pause()
    for shipper in second:
        shipper.ship("goodbye\n").end()


@pytest.mark.rotating
async def test_following_to_the_end(world: ApiWorld, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower gets each line exactly once, a remark at the new attempt, and the lines uploaded after the end."""
    monkeypatch.setattr(logs, "LATE_S", 2.0)
    base, id_ = serve(world), world.add_workload()
    life = threading.Thread(target=_run, args=(world, id_))
    received: list[str] = []
    async with (
        httpx.AsyncClient(base_url=base, headers=world.headers("vision"), timeout=60) as client,
        client.stream("GET", f"/v1/workloads/{id_}/logs", params={"follow": True}) as answer,
    ):
        assert answer.status_code == 200
        life.start()
        async for line in answer.aiter_lines():
            received.append(line)
    life.join()
    remark = received.index("--- attempt 2 in south")
    for attempt, lines in ((1, received[:remark]), (2, received[remark + 1 :])):
        for task in (0, 1):
            own = [line for line in lines if line.startswith(f"trainer/{task}| ")]
            expected = [f"trainer/{task}| attempt {attempt} line {n}" for n in range(task, 20, 2)]
            assert own == expected + ([f"trainer/{task}| goodbye"] if attempt == 2 else [])
    assert len(received) == 43


async def test_following_ends_without_the_end_of_a_lost_machine(
    world: ApiWorld, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the end marker of a log is missing, a follow ends a limited time after the workload has ended."""
    monkeypatch.setattr(logs, "LATE_S", 0.1)
    base, id_ = serve(world), placed(world)
    Shipper(world.buckets["north"], id_).ship("last wor")
    world.set_phase(id_, Phase.FAILED)
    async with httpx.AsyncClient(base_url=base, headers=world.headers("operator"), timeout=60) as client:
        answer = await client.get(f"/v1/workloads/{id_}/logs", params={"follow": True, "task": 0, "tail": 5})
    assert answer.text == "last wor\n"


@pytest.mark.parametrize("tail", [None, 1])
async def test_a_read_right_after_the_end(world: ApiWorld, tail: int | None) -> None:
    """It waits for the output that the machine still uploads, also if it does not follow."""
    id_ = placed(world, slots=0b01)
    shipper = Shipper(world.buckets["north"], id_).ship("loss 1\n")
    with world.session() as session:
        session.connection().exec_driver_sql("update attempt set released_at = now()")
    world.set_phase(id_, Phase.SUCCEEDED)
    late = threading.Timer(0.5, lambda: shipper.ship("saved\n").end())
    late.start()
    try:
        assert await read(world, id_, task=0, **({} if tail is None else {"tail": tail})) == (
            "saved\n" if tail else "loss 1\nsaved\n"
        )
    finally:
        late.join()


async def test_a_read_right_after_the_loss_of_a_machine(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the end marker never comes, a read waits for a limited time and then has the output that was uploaded."""
    monkeypatch.setattr(logs, "LATE_S", 1.0)
    id_ = placed(world, slots=0b01)
    Shipper(world.buckets["north"], id_).ship("loss 1\n")
    with world.session() as session:
        session.connection().exec_driver_sql("update attempt set released_at = now()")
    world.set_phase(id_, Phase.FAILED)
    assert await read(world, id_, task=0) == "loss 1\n"


async def test_follow_with_tail_goes_on_where_the_tail_ends(world: ApiWorld, serve: Serve) -> None:
    """`follow` with `tail` sends the tail and then each new line exactly once."""
    base, id_ = serve(world), placed(world)
    shipper = Shipper(world.buckets["north"], id_).ship("one\ntwo\nthr")
    lines = []
    async with (
        httpx.AsyncClient(base_url=base, headers=world.headers("operator"), timeout=60) as client,
        client.stream("GET", f"/v1/workloads/{id_}/logs", params={"follow": True, "task": 0, "tail": 1}) as answer,
    ):
        async for line in answer.aiter_lines():
            lines.append(line)
            if line == "two":
                shipper.ship("ee\nfour\n").end()
                world.set_phase(id_, Phase.SUCCEEDED)
    assert lines == ["two", "three", "four"]


async def test_workload_that_vanishes_while_followed(world: ApiWorld, serve: Serve) -> None:
    """A follow ends if the workload is deleted."""
    base, id_ = serve(world), world.add_workload()
    async with (
        httpx.AsyncClient(base_url=base, headers=world.headers("operator"), timeout=60) as client,
        client.stream("GET", f"/v1/workloads/{id_}/logs", params={"follow": True}) as answer,
    ):
        with world.session() as session:
            session.delete(session.get_one(Workload, id_))
        assert await answer.aread() == b""
