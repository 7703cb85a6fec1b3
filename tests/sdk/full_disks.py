"""A small file system that a test fills, and a training whose checkpoints are on it."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import (
    Checkpointer,
    StepStatus,
)

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
FULL = "No space left on device"


class Disk:
    """A file system of 2 MiB that a test fills and empties."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Fills the file system completely."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def clear(self) -> None:
        """Frees the space again."""
        (self.path / "filler").unlink()

    @property
    def files(self) -> set[Path]:
        """All files of the root of checkpoints."""
        return {path for path in (self.path / "root").rglob("*") if path.is_file()}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mounts a small file system."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", path], check=True)


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
