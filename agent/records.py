"""Small records in files, whole or not at all: JSON that is replaced in one step and synced.

Standard library only: the shim imports it. How a task ended must be on the disk even where that is full by then, so the
space of such a record is reserved before the task starts.
"""

import contextlib
import errno
import json
import os
import time
from typing import Any

RESERVED_BYTES = 1024
"""Disk space that is reserved for a record."""
_RESERVE = ".reserve"


def write_durably(path: str, body: dict[str, Any] | bytes) -> None:
    """Write `body` (as JSON, unless it is bytes) in one step: a temporary file, synced, renamed, the folder synced.

    Only the owner can read the file. Where the disk is full nothing is left of it.
    """
    temporary = f"{path}.{os.getpid()}.{time.monotonic_ns()}.tmp"
    try:
        _write_synced(temporary, body if isinstance(body, bytes) else json.dumps(body).encode())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path)


def reserve(path: str) -> None:
    """Reserve the disk space of a record that `write_reserved` writes to `path` later, when the disk may be full.

    Not synced: after a power cut it may be gone, and the record is written like any other.
    """
    descriptor = os.open(f"{path}{_RESERVE}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, RESERVED_BYTES)
    finally:
        os.close(descriptor)


def write_reserved(path: str, body: dict[str, Any]) -> None:
    """`write_durably` in the space that was reserved, so that a full disk cannot refuse it.

    The space is overwritten in place and synced before it gets the record's name. A record that has no reserved space,
    or has used it up, is written like any other.
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
    except FileNotFoundError:  # Another writer has used it.
        write_durably(path, text)
        return
    _sync_folder(path)


def recover_reserved(path: str) -> bool:
    """Give a record its name that was written whole into the reserved space of `path`; False where there is none."""
    try:
        with open(f"{path}{_RESERVE}", "rb") as file:
            json.loads(file.read())
        os.replace(f"{path}{_RESERVE}", path)
    except (OSError, ValueError):
        return False
    _sync_folder(path)
    return True


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
