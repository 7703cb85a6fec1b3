"""One stack for a data folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import StackError


@contextmanager
def data_folder(path: Path) -> Iterator[Path]:
    """The data folder, made if it is not there, and this process's alone.

    Raises:
        StackError: another process runs a stack on it, or it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
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
