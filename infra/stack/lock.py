"""The lock of a data folder, which ensures that only one stack uses it."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import StackError

_log = logging.getLogger(__name__)


def _close(path: Path, mode: int) -> None:
    """Removes other users' permissions on a data folder that an earlier version created."""
    wanted = {path: mode, path / "machines": mode, path / "run": 0o700}
    wanted |= dict.fromkeys(path.glob("temporal.db*"), 0o600)
    for found, most in wanted.items():
        if found.exists() and found.stat().st_uid == os.geteuid() and (old := found.stat().st_mode & 0o777) & ~most:
            found.chmod(old & most)
            _log.warning("%s: mode %o was too permissive; changed to %o", found, old, old & most)


@contextmanager
def data_folder(path: Path) -> Iterator[Path]:
    """Creates the data folder if it is missing, and holds its lock in the context. Gives the absolute path.

    Raises:
        StackError: another process uses the folder, or it cannot be written.
    """
    try:
        # Root's folder can be entered, but not listed, by other users: Postgres and tasks run as other users below it.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        _close(path, mode)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
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
