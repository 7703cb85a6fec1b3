"""Fixtures of the agent's tests: no process of a test may outlive it, and a dev server for those that need one."""

import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from tests.agent.harness import Lab, dev_server, processes_of


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    """Every test's tasks and shims carry its folder in their command or environment: none may be left."""
    yield
    give_up_s = time.monotonic() + 5
    while (left := processes_of(tmp_path)) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    for pid in left:
        subprocess.run(["kill", "-9", str(pid)], check=False)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="package")
def temporal_address() -> Iterator[str]:
    """Address of a Temporal dev server, in memory."""
    port = free_port()
    with dev_server(port):
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def lab(tmp_path: Path, temporal_address: str) -> AsyncIterator[Lab]:
    """A bucket, a Temporal client and a worker that calls agents' activities for the test."""
    async with Lab.open(tmp_path, temporal_address) as opened:
        yield opened
