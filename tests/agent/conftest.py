"""Fixtures of the agent's tests: a check for leftover processes, and a worker that calls agents."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.agent.fake_gpus import fake_gpus, fake_library
from tests.agent.harness import Lab, processes_of
from tests.small_disks import SmallDisk, small_disk

__all__ = ["fake_gpus", "fake_library"]
DISK_BYTES, DISK_FILES = 64 << 20, 4000
"""Size of the file system of the fixture `disk`."""


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    """Fails a test that leaves processes: its tasks and shims have its folder in their command line or environment."""
    yield
    give_up_s = time.monotonic() + 5
    while (left := processes_of(tmp_path)) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    for pid in left:
        subprocess.run(["kill", "-9", str(pid)], check=False)
    assert not left, f"the test left these processes: {left}"


@pytest.fixture
async def lab(tmp_path: Path, temporal_address: str) -> AsyncIterator[Lab]:
    """Yields a bucket, a Temporal client and a worker that calls the agents' activities."""
    async with Lab.open(tmp_path, temporal_address) as opened:
        yield opened


@pytest.fixture
async def open_lab(temporal_address: str) -> AsyncIterator[Lab]:
    """Yields a lab below a folder that only root may enter, like an installation in root's home."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        async with Lab.open(root, temporal_address) as lab:
            yield lab
    finally:
        shutil.rmtree(root)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a small file system, in which the state of the agents is."""
    with small_disk(tmp_path / "disk", f"size={DISK_BYTES},nr_inodes={DISK_FILES}") as path:
        yield path


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mounts a file system that a test can fill."""
    with small_disk(tmp_path / "small", "size=1m") as path:
        yield SmallDisk(path)
