"""Fixtures: an installation with a provider, on a real Temporal server and a real Postgres."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy import Engine
from temporalio.client import Client

from tests.activities.conftest import client, database, database_url, shared_engine, shared_url
from tests.capacity.site import Site

__all__ = ["client", "database", "database_url", "shared_engine", "shared_url"]


@pytest_asyncio.fixture
async def site(database: Engine, database_url: str, client: Client, tmp_path: Path) -> AsyncIterator[Site]:
    """A cloud with a zone of three machines and a more expensive zone of two."""
    async with Site.open(database, database_url, client, tmp_path) as opened:
        yield opened
