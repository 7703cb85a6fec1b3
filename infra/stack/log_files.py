"""Log files of processes that keep them open: cut when they grow too long, with a few older parts beside them.

A process appends to its file (O_APPEND), so the file is copied and then emptied in place. What is written between the
two is lost: a few lines at most, and only of what was just printed.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)


def rotate(files: Iterable[Path], max_bytes: int, keep: int) -> list[Path]:
    """Cuts each file that is longer than `max_bytes`; `keep` older parts stay as `NAME.1` (the newest) and so on.

    Where there is no room for a copy, the file is emptied without one: a full disk needs the room more.
    Returns the files that were cut.
    """
    cut = []
    for file in files:
        try:
            if file.stat().st_size > max_bytes:
                _cut(file, keep)
                cut.append(file)
        except OSError as error:
            _log.warning("log file %s could not be cut: %s", file, error.strerror)
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
