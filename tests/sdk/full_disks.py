"""A small file system that a test fills, and a training whose checkpoints are on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import Checkpointer, StepStatus
from tests.small_disks import SmallDisk, small_disk

FULL = "No space left on device"


class Disk(SmallDisk):
    """A file system of 2 MiB that a test fills and empties."""

    @property
    def files(self) -> set[Path]:
        """All files of the root of checkpoints."""
        return {path for path in (self.path / "root").rglob("*") if path.is_file()}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mounts a small file system."""
    with small_disk(tmp_path / "disk", "size=2m") as path:
        yield Disk(path)


def training(root: object, **given: Any) -> tuple[Checkpointer, dict[str, Any]]:
    """Returns the checkpointer of a training that saves every step, and its state."""
    checkpointer = Checkpointer(str(root), **{"interval_s": 0, **given})
    state = {"raw": b""}
    checkpointer.track(model=state)
    checkpointer.restore()
    return checkpointer, state


def step(training: tuple[Checkpointer, dict[str, Any]], number: int) -> StepStatus:
    """Makes a step with another content."""
    checkpointer, state = training
    state["raw"] = bytes([number % 256]) * 100_000
    return checkpointer.step(number)
