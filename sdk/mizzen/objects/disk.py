"""What a store in a folder asks of the kernel: locks, durable writes, folders that stay."""

import ctypes
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from mizzen.objects.store import Body, chunks_of

_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_ABANDONED_S = 3600.0
"""Where files cannot be locked, a staged one that has not grown for so long is nobody's."""
_WRITE_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2


def lock(descriptor: int) -> bool | None:
    """Take the lock of a staged file; false if its writer has it, None where files cannot be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def advise(descriptor: int, advice: str, start: int = 0, size_bytes: int = 0) -> None:
    """Tell the kernel how a range of a file is used (0: to its end). What a file system does not take fails nothing."""
    number = getattr(os, advice, None)
    if number is not None:
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, size_bytes, number)


def in_memory(descriptor: int, start: int) -> bool:
    """Whether a file's page at `start` can be read without waiting for a disk; True where the system cannot say."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return True
    try:
        os.preadv(descriptor, [bytearray(1)], start, nowait)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class Turns:
    """A lock that threads get in the order in which they asked for it. `threading.Lock` gives it to any of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._served = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for one's turn, and end it."""
        with self._changed:
            mine = self._asked
            self._asked += 1
            self._changed.wait_for(lambda: self._served == mine)
        try:
            yield
        finally:
            with self._changed:
                self._served += 1
                self._changed.notify_all()


def abandoned(descriptor: int) -> bool:
    """Whether a staged file is nobody's any more."""
    locked = lock(descriptor)
    return idle(descriptor, _ABANDONED_S) if locked is None else locked


def idle(descriptor: int, idle_s: float) -> bool:
    """Whether a file was last written so long ago."""
    return os.fstat(descriptor).st_mtime <= time.time() - idle_s


def write(descriptor: int, body: Body) -> None:
    """Write the content of a new file and make it durable."""
    written = 0
    for view in _views(body):
        while view:
            count = os.write(descriptor, view[:_WRITE_BYTES])
            if count == _WRITE_BYTES:
                # The disk works while the rest is copied: half the time of leaving it all to fsync.
                _begin_writeback(descriptor, written, count)
            written += count
            view = view[count:]
    os.fsync(descriptor)


@cache
def _sync_file_range() -> Any:
    """Linux's `sync_file_range`, which Python does not have; None elsewhere."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def _begin_writeback(descriptor: int, start: int, count: int) -> None:
    """Let the kernel begin to write these bytes to the disk, without waiting; it promises nothing, unlike fsync."""
    if function := _sync_file_range():
        function(descriptor, start, count, _SYNC_FILE_RANGE_WRITE)


def _views(body: Body) -> Iterator[memoryview]:
    if not isinstance(body, Path):
        yield from chunks_of(body)
        return
    buffer = memoryview(bytearray(_WRITE_BYTES))
    with body.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            yield buffer[:count]


def make_folders(folder: Path) -> list[Path]:
    """Make `folder` and its parents where they are not there; returns those that were not."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for absent in reversed(missing):
        try:
            absent.mkdir()
        except FileExistsError:
            # Another writer's folder, unless a delete has taken that away already: then there is none, which is told.
            if not stat.S_ISDIR(absent.lstat().st_mode):
                raise
    return missing


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # A delete took it away again, and the object with it.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
