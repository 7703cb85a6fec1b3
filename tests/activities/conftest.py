"""Fixtures of the activity tests: installations on separate databases, and a Temporal server."""

import math
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from sqlalchemy import Engine
from temporalio.client import Client

from activities.roles import control_worker, region_worker
from activities.scheduling import auction
from infra.config.services import TemporalSettings
from infra.db.session import close_engine, open_engine
from infra.temporal_client import connect
from tests.activities.placement_runs import PlacementWorld
from tests.activities.temporal import dispatching, end_all
from tests.activities.world import World
from tests.buckets import s3_endpoint, s3_url
from tests.databases import Databases

__all__ = ["s3_endpoint", "s3_url"]


@pytest.fixture(scope="session")
def shared_url(databases: Databases) -> str:
    """URL of a database that the tests of a folder use one after the other. Its commits do not wait for the disk."""
    url = databases.take()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"alter database {connection.info.dbname} set synchronous_commit = off")  # type: ignore[call-overload]
    return url


@pytest.fixture
def database_url(databases: Databases, shared_url: str) -> str:
    """URL of the shared database with all rows deleted."""
    databases.delete_rows(shared_url)
    return shared_url


@pytest.fixture(scope="session")
def shared_engine(shared_url: str) -> Iterator[Engine]:
    """One engine for all tests, because it caches compiled statements."""
    engine = open_engine(shared_url)
    yield engine
    close_engine(engine)


@pytest.fixture
def database(shared_engine: Engine, database_url: str) -> Iterator[Engine]:
    """An engine on `database_url`; the test fails if it leaves a connection checked out."""
    yield shared_engine
    assert shared_engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.fixture
def world(database: Engine, tmp_path: Path) -> World:
    """An installation with only the tenant `t`."""
    made = World(database, tmp_path)
    made.tenant()
    return made


@pytest.fixture
def new_world(databases: Databases, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """A function that creates installations on separate databases, either empty or copied from another installation."""
    engines: list[Engine] = []
    taken: list[str] = []
    copies: list[str] = []

    def make(copy_of: World | None = None) -> World:
        if copy_of is None:
            url = databases.take()
            taken.append(url)
        else:
            copy_of.engine.dispose()
            databases.release(copy_of.engine.url.render_as_string(hide_password=False))
            url = databases.create(str(copy_of.engine.url.database))
            copies.append(url)
        engines.append(open_engine(url))
        return World(engines[-1], tmp_path / url.rsplit("/", 1)[1])

    yield make
    for engine in engines:
        close_engine(engine)
    for url in taken:
        databases.give(url)
    for url in copies:
        databases.drop(url)


@pytest.fixture
async def client(temporal_address: str) -> AsyncIterator[Client]:
    """A client of the Temporal server; workflows that still run after the test are terminated."""
    connected = await connect(TemporalSettings(address=temporal_address))
    yield connected
    await end_all(connected)


@pytest.fixture
def town(database: Engine, tmp_path: Path) -> World:
    """An installation with the tenant `t`, a region and a machine; the prefix of its workload ids is unique."""
    made = World(database, tmp_path, prefix=f"wl-{uuid.uuid4().hex[:8]}")
    made.tenant()
    made.region("r")
    made.machine("r/c/m", 4)
    return made


@pytest_asyncio.fixture
async def running(placement_runs: PlacementWorld, client: Client, database_url: str) -> AsyncIterator[Client]:
    """Runs workers of all roles of the fixture `placement_runs`, with the regions east and west, and a dispatcher."""
    world = placement_runs.world
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(8))
        await stack.enter_async_context(
            control_worker(client, world.engine, world.settings, threads, world.scheduler_state)
        )
        for region in ("east", "west"):
            await stack.enter_async_context(
                region_worker(client, region, world.engine, world.settings, threads, world.scheduler_state)
            )
        await stack.enter_async_context(dispatching(world.engine, database_url, client))
        yield client


@pytest.fixture
def publishes_every_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scan is left out because publishing the one before took long, as it may on a busy machine."""
    monkeypatch.setattr(auction, "_PUBLISHING_SHARE", math.inf)
