"""Small JSON files that are written atomically and synced to the disk.

Uses the standard library only, because the shim imports this module. A task's exit status must be written even if the
disk is full when the task ends, so the space for that file is reserved before the task starts.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from typing import Any

RESERVED_BYTES = 1024
"""Disk space reserved for one record, in bytes."""
_RESERVE = ".reserve"


def write_durably(path: str, body: dict[str, Any] | bytes) -> None:
    """Write `body` to `path` atomically and durably: write and sync a temporary file, rename it, sync the folder.

    A `body` that is not bytes is written as JSON. Only the owner can read the file. If the write fails, for example
    because the disk is full, the temporary file is removed.
    """
    temporary = f"{path}.{os.getpid()}.{time.monotonic_ns()}.tmp"
    with _replacing(path, temporary):
        _write_synced(temporary, body if isinstance(body, bytes) else json.dumps(body).encode())
    _sync_folder(path)


def reserve(path: str) -> None:
    """Reserve disk space in which `write_reserved` can write a record to `path` later, even if the disk is full.

    The reservation is not synced, so a power failure can lose it. `write_reserved` then needs free disk space.
    """
    descriptor = os.open(f"{path}{_RESERVE}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, RESERVED_BYTES)
    finally:
        os.close(descriptor)


def write_reserved(path: str, body: dict[str, Any]) -> None:
    """Write `body` to `path` like `write_durably`, but into the reserved space, so that it succeeds on a full disk.

    The reserved file is overwritten in place and synced before it is renamed to `path`. If there is no reserved file,
    or an earlier write has used it, this calls `write_durably`.
    """
    text = json.dumps(body).encode()
    try:
        descriptor = os.open(f"{path}{_RESERVE}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        write_durably(path, text)
        return
    try:
        if len(text) > RESERVED_BYTES or os.pwrite(descriptor, text.ljust(RESERVED_BYTES), 0) < RESERVED_BYTES:
            raise OSError(errno.ENOSPC, "the reserved space is too small", path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.replace(f"{path}{_RESERVE}", path)
    except FileNotFoundError:  # Another writer has already renamed the reserved file.
        write_durably(path, text)
        return
    _sync_folder(path)


def recover_reserved(path: str) -> bool:
    """Rename the reserved file of `path` to `path` if it holds a complete record; return False if it does not."""
    try:
        with open(f"{path}{_RESERVE}", "rb") as file:
            json.loads(file.read())
        os.replace(f"{path}{_RESERVE}", path)
    except (OSError, ValueError):
        return False
    _sync_folder(path)
    return True


def publish(path: str, body: dict[str, Any]) -> None:
    """Replace `path` with `body` as JSON that every user can read. It is not synced.

    Links that a task has left at the path are replaced and not followed. If the write fails, the old file stays.
    """
    temporary = f"{path}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _replacing(path, temporary), os.fdopen(os.open(temporary, flags, 0o644), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(json.dumps(body).encode())


@contextlib.contextmanager
def _replacing(path: str, temporary: str) -> Iterator[None]:
    """Renames the temporary file to `path` at the end of the block. If either fails, removes the temporary file."""
    try:
        yield
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_synced(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: str) -> None:
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
