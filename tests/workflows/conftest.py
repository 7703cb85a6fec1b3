"""Fixtures of the workflow tests. All share one event loop, one test server and, where needed, one dev server.

The servers end with the last test of the folder: they poll and take memory even while no test uses them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from temporalio.client import Client

from tests.workflows.lab import Lab, Life
from tests.workflows.replays import replay
from tests.workflows.servers import dev_server, settled, skipping_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs all tests in the session's event loop, to which Temporal's clients and workers belong."""
    for item in items:
        if "tests/workflows/" in item.path.as_posix() and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client() -> AsyncIterator[Client]:
    """A client of a time-skipping test server; these tests skip no time."""
    async with skipping_server() as (_, connected):
        yield connected
    await settled()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def dev_client() -> AsyncIterator[Client]:
    """A client of a dev server."""
    async with dev_server() as connected:
        yield connected


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def lab(client: Client) -> AsyncIterator[Lab]:
    """Control and region workers on the test server."""
    async with Lab.open(client) as opened:
        yield opened


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def dev_lab(dev_client: Client) -> AsyncIterator[Lab]:
    """Control and region workers on the dev server."""
    async with Lab.open(dev_client) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def unborn(lab: Lab) -> AsyncIterator[Life]:
    """A workload whose workflow is not started yet. At the end of the test its history must replay."""
    life = lab.life()
    async with checked(life):
        yield life


@pytest_asyncio.fixture(loop_scope="session")
async def life(unborn: Life) -> Life:
    """A queued workload with two machines."""
    await unborn.begins()
    return unborn


@pytest_asyncio.fixture(loop_scope="session")
async def lone(lab: Lab) -> AsyncIterator[Life]:
    """A queued workload with one machine, which starts its task immediately after the award."""
    life = lab.life(1)
    life.plan.starts_at_once = True
    async with checked(life):
        await life.begins()
        yield life


@pytest_asyncio.fixture(loop_scope="session")
async def real_life(dev_lab: Lab) -> AsyncIterator[Life]:
    """A queued workload with two machines, on the dev server."""
    life = dev_lab.life()
    async with checked(life):
        await life.begins()
        yield life


@asynccontextmanager
async def checked(life: Life) -> AsyncIterator[None]:
    """Checks at the end that each attempt was released once and that the history replays."""
    try:
        yield
        life.check_releases()
        await replay(await life.handle.fetch_history())
    finally:
        await life.close()
