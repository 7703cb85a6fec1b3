"""Fixtures of the console's tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from console.application import create_app
from tests.api.conftest import serve
from tests.api.world import ApiWorld, make_world
from tests.databases import Databases

__all__ = ["serve"]
Browse = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def world(database_url: str, tmp_path: Path) -> Iterator[ApiWorld]:
    """Yields a new installation with a console."""
    with make_world(database_url, tmp_path, create=create_app) as made:
        yield made


@pytest.fixture(scope="module")
def shared_world(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    """Yields an installation with a console that the tests of a module share."""
    with databases.taken() as url, make_world(url, tmp_path_factory.mktemp("w"), create=create_app) as made:
        yield made


@pytest.fixture
def browse(world: ApiWorld) -> Browse:
    """Returns a function that returns a client with the cookies of a browser, which logs in with a key of the world."""
    return browser_of(world)


def browser_of(world: ApiWorld) -> Browse:
    """Returns the same for any world."""

    @asynccontextmanager
    async def browser(key: str | None = "operator", scheme: str = "http") -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(world.app)
        async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://api") as client:
            if key is not None:
                answer = await client.post("/console/login", data={"key": world.raw_keys[key]})
                assert answer.status_code == 303, answer.text
            yield client
        # A refusal is written after its answer. The test may close the database next.
        await world.app.state.mizzen.refusals.aclose()

    return browser
