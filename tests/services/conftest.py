"""Fixtures: a service on a real Temporal server, a real Postgres and a simulated cloud."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy import Engine
from temporalio.client import Client

from tests.activities.conftest import client, database, database_url, shared_engine, shared_url
from tests.services.live import Live

__all__ = ["client", "database", "database_url", "shared_engine", "shared_url"]


@pytest_asyncio.fixture
async def live(database: Engine, database_url: str, client: Client, tmp_path: Path) -> AsyncIterator[Live]:
    """A cloud with two spot zones and an on-demand zone, and one shared machine."""
    async with Live.open(database, database_url, client, tmp_path) as opened:
        yield opened
