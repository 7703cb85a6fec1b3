"""Regions whose buckets do not answer: nothing is placed there, everybody is told why, and it ends by itself."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activities.data.buckets import BucketCheck
from bench.buckets import Endpoint
from domain import ids
from infra.config import BucketSettings
from infra.db.buckets import BucketState, bucket_states
from infra.db.models import Region
from tests.activities.world import World, job
from tests.objects.faulty import Answer, Proxy, proxy

FAST = BucketSettings(timeout_s=0.5, retry_s=0.01, retry_max_s=0.01)


@pytest.fixture
def check(world: World) -> BucketCheck:
    """Checks of the west, one of two regions."""
    for region in ("east", "west"):
        world.region(region)
        world.machine(f"{region}/c/m", gpus=4)
    return BucketCheck(world.engine, FAST, "west")


def _state(world: World) -> BucketState:
    with world.session() as session:
        return bucket_states(session, ["west"])["west"]


def _folder(world: World) -> Path:
    return world.folder / "buckets" / "west"


async def _is_left_out(world: World, check: BucketCheck, error: str) -> str:
    """Two failed checks, then a pass: what only the west may hold waits for the reason; that workload."""
    only = world.submit(job(), regions_allowed=("west",))
    for _ in range(FAST.failures):
        assert await check.check() == FAST.retry_s
    other = world.submit(job(gpus=4))
    world.tick()
    assert (world.workload(only).region, world.workload(other).region) == (None, "east")
    assert world.waiting(only) == ["region_excluded east", "bucket_unavailable west"]
    assert error in world.reasons(only)[1]["sentence"]
    assert _state(world).failing_since_s is not None
    return only


async def _is_back(world: World, check: BucketCheck, waiting: str) -> None:
    """One check that succeeds, then a pass: the west has its part again."""
    assert await check.check() == FAST.interval_s
    assert _state(world).failing_since_s is None and not _state(world).error
    world.tick()
    assert world.workload(waiting).region == "west"


async def test_a_folder_that_is_renamed_away(world: World, check: BucketCheck) -> None:
    """The region is left out, also when others make the folder anew; the folder's return ends it."""
    assert await check.check() == FAST.interval_s
    away = _folder(world).with_name("away")
    _folder(world).rename(away)
    waiting = await _is_left_out(world, check, "its marker object regions/west/marker is missing")
    world.bucket("west").put("logs/wl-1/0.log", b"an agent writes on")
    assert await check.check() == FAST.retry_max_s
    assert _state(world).failing_since_s is not None
    _folder(world).rename(world.folder / "new")
    away.rename(_folder(world))
    await _is_back(world, check, waiting)


async def test_one_failed_check_is_no_outage(world: World, check: BucketCheck) -> None:
    """A check that fails once and then succeeds leaves the region in."""
    await check.check()
    marker = _folder(world) / ids.bucket_marker_key("west")
    marker.unlink()
    await check.check()
    assert _state(world).failing_since_s is None
    marker.touch()
    await check.check()
    marker.unlink()
    await check.check()
    assert _state(world).failing_since_s is None, "failures count in a row"


@contextmanager
def _hanging(server: Proxy) -> Iterator[None]:
    """Requests get no answer meanwhile."""
    go_on = threading.Event()

    def wait(_: Answer) -> None:
        go_on.wait()

    server.fault = wait
    try:
        yield
    finally:
        server.fault = lambda _: None
        go_on.set()


@pytest.fixture
async def server(
    world: World, check: BucketCheck, s3_url: str, s3_endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Proxy]:
    """The west's bucket is on an S3 server, behind this; the check has found it once."""
    with proxy(s3_endpoint.url) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        world.alter(Region, "west", bucket_url=s3_url)
        while await check.check() != FAST.interval_s:
            pass  # Importing the client may take longer than this test's time limit.
        yield found


async def test_a_store_that_hangs(world: World, check: BucketCheck, server: Proxy) -> None:
    """A store that takes requests and does not answer is waited for by one thread, within the time limit."""
    with _hanging(server):
        waiting = await _is_left_out(world, check, "no answer within 0.5 s")
        await check.check()
        assert sum(thread.name == "bucket check" for thread in threading.enumerate()) == 1
    while await check.check() != FAST.interval_s:
        pass
    await _is_back(world, check, waiting)


async def test_a_store_that_refuses(world: World, check: BucketCheck, server: Proxy) -> None:
    """What the store said is shown."""

    def refuse(answer: Answer) -> None:
        answer.headers = {"content-type": "application/xml"}
        answer.status, answer.body = 403, b"<Error><Code>AccessDenied</Code><Message>not yours</Message></Error>"

    server.fault = refuse
    waiting = await _is_left_out(world, check, "not yours")
    server.fault = lambda _: None
    await _is_back(world, check, waiting)


async def test_a_region_that_is_not_there_yet(world: World) -> None:
    """A worker may start before its region is registered."""
    assert await BucketCheck(world.engine, FAST, "north").check() == FAST.interval_s
    with world.session() as session:
        assert bucket_states(session, ["north"]) == {}
