"""Rotates the log files of running processes when they grow too large, and keeps a few rotated files.

A process keeps its file open for appending (O_APPEND), so the file is copied and then truncated in place. Output that
is written between the two steps is lost, at most a few lines.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)


def rotate(files: Iterable[Path], max_bytes: int, keep: int) -> list[Path]:
    """Rotates each file that is larger than `max_bytes`, and returns the rotated files.

    Keeps the last `keep` copies as `NAME.1` (the newest), `NAME.2` and so on. If there is no disk space for a copy, the
    file is truncated without one, to free space.
    """
    cut = []
    for file in files:
        try:
            if file.stat().st_size > max_bytes:
                _cut(file, keep)
                cut.append(file)
        except OSError as error:
            _log.warning("log file %s could not be rotated: %s", file, error.strerror)
    return cut


def _cut(file: Path, keep: int) -> None:
    _part(file, keep).unlink(missing_ok=True)
    for number in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            _part(file, number).rename(_part(file, number + 1))
    newest = _part(file, 1)
    if keep > 0:
        try:
            shutil.copyfile(file, newest)
        except OSError:
            newest.unlink(missing_ok=True)
    os.truncate(file, 0)


def _part(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}")
