"""Regions whose bucket fails: no workload is placed there, waiting workloads get the reason, and it recovers."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activities.data.buckets import BucketCheck
from bench.buckets import EmulatorEndpoint
from domain import ids
from infra.config.scheduling import BucketSettings
from infra.db.buckets import BucketState, bucket_states
from infra.db.models import Region
from tests.activities.world import World, job
from tests.objects.faulty import Answer, Proxy, proxy

FAST = BucketSettings(timeout_s=0.5, retry_s=0.01, retry_max_s=0.01)


@pytest.fixture
def check(world: World) -> BucketCheck:
    """A bucket check of region west, one of two regions."""
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
    """Runs two failed checks and a pass; returns a workload that may run only in west and waits with the reason."""
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
    """Runs a successful check and a pass: west gets workloads again."""
    # On a busy machine a check may take longer than its timeout.
    for _ in range(5):
        if await check.check() == FAST.interval_s:
            break
    assert _state(world).failing_since_s is None and not _state(world).error
    world.tick()
    assert world.workload(waiting).region == "west"


async def test_a_folder_that_is_renamed_away(world: World, check: BucketCheck) -> None:
    """The region is excluded even if another process recreates the folder, until the original folder is back."""
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
    """A region stays in use if one check fails and the next one succeeds."""
    await check.check()
    marker = _folder(world) / ids.bucket_marker_key("west")
    marker.unlink()
    await check.check()
    assert _state(world).failing_since_s is None
    marker.touch()
    await check.check()
    marker.unlink()
    await check.check()
    assert _state(world).failing_since_s is None, "only consecutive failures count"


@contextmanager
def _hanging(server: Proxy) -> Iterator[None]:
    """Requests get no response while the context is open."""
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
    world: World, check: BucketCheck, s3_url: str, s3_endpoint: EmulatorEndpoint, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Proxy]:
    """A proxy in front of the S3 server that holds west's bucket; one check has succeeded."""
    with proxy(s3_endpoint.url) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        world.alter(Region, "west", bucket_url=s3_url)
        while await check.check() != FAST.interval_s:
            pass  # Importing the client may take longer than this test's time limit.
        yield found


async def test_a_store_that_hangs(world: World, check: BucketCheck, server: Proxy) -> None:
    """If a store accepts requests without responding, one thread waits for it, and the check times out."""
    with _hanging(server):
        waiting = await _is_left_out(world, check, "no answer within 0.5 s")
        await check.check()
        assert sum(thread.name == "bucket check" for thread in threading.enumerate()) == 1
    while await check.check() != FAST.interval_s:
        pass
    await _is_back(world, check, waiting)


async def test_a_store_that_refuses(world: World, check: BucketCheck, server: Proxy) -> None:
    """The store's error message is in the reason."""

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
