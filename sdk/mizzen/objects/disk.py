"""File system calls for `FileStore`: locks, durable writes, durable folders, page cache hints."""

import ctypes
import errno
import fcntl
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from mizzen.objects.buffers import aligned
from mizzen.objects.store import Body, chunks_of

_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_ABANDONED_S = 3600.0
"""If files cannot be locked, a staged file that was not written for this long counts as abandoned."""
_WRITE_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2
_MADE = "user.mizzen.made"
"""Extended attribute of folders that a store has created."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


def lock(descriptor: int) -> bool | None:
    """Try to lock a staged file. Return False if another process holds the lock, None if locks are unsupported."""
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
    """Give the kernel an access hint for a range of a file (0: to its end). Errors are ignored."""
    number = getattr(os, advice, None)
    if number is not None:
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, size_bytes, number)


def in_memory(descriptor: int, start: int) -> bool:
    """Return whether the page at offset `start` is in the page cache; True if the system cannot tell."""
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


class FairLock:
    """A fair lock: threads get it in the order of their requests. `threading.Lock` guarantees no order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._served = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the lock, and hold it within this context."""
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
    """Return whether no process uses a staged file any more."""
    locked = lock(descriptor)
    return idle(descriptor, _ABANDONED_S) if locked is None else locked


def idle(descriptor: int, idle_s: float) -> bool:
    """Return whether a file was last written at least `idle_s` seconds ago."""
    return os.fstat(descriptor).st_mtime <= time.time() - idle_s


def write(descriptor: int, body: Body) -> None:
    """Write the content of a new file and sync it to the disk."""
    begun = written = 0
    for view in _views(body):
        while view:
            count = os.write(descriptor, view[:_WRITE_BYTES])
            written += count
            if written - begun >= _WRITE_BYTES:
                # Start the writeback now, in parallel with the next writes: takes half the time of a single fsync.
                _begin_writeback(descriptor, begun, written - begun)
                begun = written
            view = view[count:]
    os.fsync(descriptor)


def read(descriptor: int, into: bytearray | memoryview, at: int) -> int:
    """Fill a buffer from the offset `at` of a file, and return the number of bytes read."""
    filled = 0
    while filled < len(into) and (count := os.preadv(descriptor, [memoryview(into)[filled:]], at + filled)):
        filled += count
    return filled


@cache
def _sync_file_range() -> Any:
    """Return Linux's `sync_file_range`, which Python does not expose; None on other systems."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def _begin_writeback(descriptor: int, start: int, count: int) -> None:
    """Start the writeback of a range of a file, without waiting. Unlike fsync it does not make the range durable."""
    if function := _sync_file_range():
        function(descriptor, start, count, _SYNC_FILE_RANGE_WRITE)


def _views(body: Body) -> Iterator[memoryview]:
    if not isinstance(body, Path):
        yield from chunks_of(body)
        return
    buffer = aligned(_WRITE_BYTES)
    with body.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            yield buffer[:count]


def make_folders(folder: Path) -> list[Path]:
    """Create `folder` and its parents if they do not exist, and return those that did not exist. See `was_made`."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for absent in reversed(missing):
        try:
            absent.mkdir()
            _mark_made(absent)
        except FileExistsError:
            # Another writer created the folder. If a delete has already removed it again, lstat raises
            # FileNotFoundError.
            if not stat.S_ISDIR(absent.lstat().st_mode):
                raise
    return missing


@contextmanager
def held(root: Path, folder: Path, made: list[Path] | None = None) -> Iterator[Path]:
    """Give a path to `folder`, below `root`, that leads to the same folder even if folders are renamed meanwhile.

    So a task that exchanges its folders for symbolic links does not change what another process reads and writes. On
    systems without Linux's `/proc`, the path is `folder`. If `made` is a list, missing folders are created, and added.

    Raises:
        FileNotFoundError: the folder does not exist.
        NotADirectoryError: a part of the path below `root` is a symbolic link or a file.
    """
    place, descriptor = root, os.open(root, _FOLDER)
    try:
        for part in folder.relative_to(root).parts:
            place /= part
            try:
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except FileNotFoundError:
                if made is None:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
                    made.append(place)
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
            if made and made[-1] == place:
                _mark_made(_path_of(descriptor, place))
        yield _path_of(descriptor, folder)
    finally:
        os.close(descriptor)


def _path_of(descriptor: int, otherwise: Path) -> Path:
    return Path(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else otherwise


def _mark_made(folder: Path) -> None:
    with suppress(OSError, AttributeError):
        os.setxattr(folder, _MADE, b"")


def was_made(folder: Path) -> bool:
    """Return whether `make_folders` created `folder`; False if the file system has no extended attributes."""
    try:
        os.getxattr(folder, _MADE)
    except (OSError, AttributeError):
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make the directory entries of `folder` durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # A delete has removed the folder and the object.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
