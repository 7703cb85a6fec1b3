"""Small file systems in memory, which tests fill and empty."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, options: str) -> Iterator[Path]:
    """Mounts a file system in memory at `path`, which is made, with options such as `size=12m`. Skips without root."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


class SmallDisk:
    """A small file system that a test fills and empties."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Fills the file system completely."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            for size_bytes in (4096, 1):
                try:
                    while file.write(b"x" * size_bytes) == size_bytes:
                        pass
                except OSError:
                    continue

    def clear(self) -> None:
        """Frees the space again."""
        (self.path / "filler").unlink()
