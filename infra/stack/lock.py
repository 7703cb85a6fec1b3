"""One stack for a data folder."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import StackError

_log = logging.getLogger(__name__)


def _close(path: Path, mode: int) -> None:
    """Takes from others what they could do in a data folder that an earlier version made."""
    wanted = {path: mode, path / "machines": mode, path / "run": 0o700}
    wanted |= dict.fromkeys(path.glob("temporal.db*"), 0o600)
    for found, most in wanted.items():
        if found.exists() and found.stat().st_uid == os.geteuid() and (old := found.stat().st_mode & 0o777) & ~most:
            found.chmod(old & most)
            _log.warning("%s: mode %o was too open, it is %o now", found, old, old & most)


@contextmanager
def data_folder(path: Path) -> Iterator[Path]:
    """The data folder, made if it is not there, and this process's alone.

    Raises:
        StackError: another process runs a stack on it, or it cannot be written.
    """
    try:
        # Root's may be entered, but not listed: Postgres and tasks run as other users, in folders of their own there.
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
            raise StackError(f"data_dir: {path} is in use by process {holder}; stop it or use another") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield path.resolve()
    finally:
        os.close(descriptor)
