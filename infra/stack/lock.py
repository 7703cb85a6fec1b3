"""The lock of a data folder, which ensures that only one stack uses it."""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import StackError

_log = logging.getLogger(__name__)
_LOCK, _IGNORE = "lock", ".gitignore"
NEW_FOLDER = (_LOCK, _IGNORE)
"""The files in a new data folder."""


def make_closed(path: Path) -> None:
    """Makes a folder that other users cannot list, if it does not exist.

    Root's folder can be entered by other users: Postgres and tasks run as other users below it.
    """
    path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)


def make_data_folder(path: Path) -> None:
    """Makes a data folder if it does not exist. In a checkout, git and `mizzen run` then ignore it, with its keys."""
    is_new = not path.exists()
    make_closed(path)
    if is_new:
        (path / _IGNORE).write_text("*\n")


@contextmanager
def data_folder(path: Path) -> Iterator[Path]:
    """Context manager that creates the data folder if it is missing, holds its lock, and returns the absolute path.

    The mode of an existing folder is not changed, because other programs may use the folder. If other users can list
    or change it, a warning is logged.

    Raises:
        StackError: another process uses the folder, or it cannot be written.
    """
    try:
        make_data_folder(path)
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o066:
            _log.warning("data_dir: %s: mode %o lets other users list or change it; mizzen leaves it", path, mode)
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StackError(f"data_dir: {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "?"
            raise StackError(
                f"data_dir: {path} is in use by process {holder}; stop that process or use another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield path.resolve()
    finally:
        os.close(descriptor)
