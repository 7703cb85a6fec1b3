"""Fixtures of the gateway's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.agent.conftest import lab, no_leftovers
from tests.agent.harness import Lab
from tests.proxies.gateway.site import Site

__all__ = ["lab", "no_leftovers"]


@pytest.fixture
async def site(lab: Lab, database: Engine, tmp_path: Path) -> AsyncIterator[Site]:
    """Yields a gateway before a Temporal server with the lab's workflows."""
    async with Site.open(lab, database, tmp_path) as opened:
        yield opened
