"""An object store in a folder of a file system. What is not a regular file below the folder is no object."""

import ctypes
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mizzen.objects.store import Body, Fetch, MissingObject, ObjectInfo, check_key, check_prefix, chunks_of, holds

_STAGING = ".staging"
_NO_OBJECT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR}
"""Absent, below a file, a link, a socket, a folder."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""A file system without hard links, such as some network mounts of buckets."""
_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_ABANDONED_S = 3600.0
"""Where files cannot be locked, a staged one that has not grown for so long is nobody's."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_RACES = 100
"""How often a put is tried again whose folder a delete removed under it."""
_WRITE_BYTES = 16 << 20
_SYNC_FILE_RANGE_WRITE = 2


class FileStore:
    """Objects are files below `root`. A put writes and syncs a file aside, then renames it.

    Tasks may write below `root` themselves, so symbolic links there are never followed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._real = Path(os.path.realpath(self._root))
        self._durable: set[Path] = set()
        """Folders whose names, and those of all above them, are on the disk for good."""

    def put(self, key: str, body: Body) -> None:
        """See `ObjectStore.put`."""
        path = self._path(key)
        with self._staged(body) as temporary:
            self._place(path, key, lambda: temporary.replace(path))

    def create(self, key: str, body: bytes) -> bool:
        """See `ObjectStore.create`. By a hard link, which is atomic also between machines that share the folder.

        On a file system without them the file is made in place: it is still made by one only, but may be seen before it
        is whole.
        """
        path = self._path(key)
        with self._staged(body) as temporary:

            def link() -> None:
                try:
                    os.link(temporary, path, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    descriptor = os.open(path, _NEW, 0o666)
                    try:
                        _write(descriptor, body)
                    finally:
                        os.close(descriptor)

            try:
                self._place(path, key, link)
            except FileExistsError:
                # A network file system may say so of a link that it has just made, if the first answer was lost.
                return holds(self, key, body)
        return True

    def forget(self, key: str) -> None:
        """See `ObjectStore.forget`: its pages leave the cache."""
        with suppress(OSError, MissingObject), os.fdopen(self._open(key), "rb") as file:
            _advise(file.fileno(), "POSIX_FADV_DONTNEED")

    def tidy(self) -> None:
        """See `ObjectStore.tidy`: staged files that nobody holds any more."""
        try:
            staged = list((self._root / _STAGING).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        for path in staged:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                if _abandoned(descriptor):
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with os.fdopen(self._open(key), "rb") as file:
            return file.read()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `ObjectStore.get_range`."""
        with os.fdopen(self._open(key), "rb") as file:
            file.seek(start)
            return file.read(max(0, end - start))

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        """See `ObjectStore.opened`. One descriptor for all pieces: the kernel reads ahead of it from disk."""
        descriptor = self._open(key)

        def fetch(into: memoryview, start: int) -> int:
            filled = 0
            while filled < len(into) and (got := os.preadv(descriptor, [into[filled:]], start + filled)):
                filled += got
            return filled

        try:
            _advise(descriptor, "POSIX_FADV_SEQUENTIAL")
            yield fetch
        finally:
            os.close(descriptor)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        folder, _, _ = check_prefix(prefix).rpartition("/")
        if self._within(self._root / folder):
            yield from self._walk(f"{folder}/" if folder else "", prefix, after)

    def size(self, key: str) -> int | None:
        """See `ObjectStore.size`."""
        try:
            descriptor = self._open(key)
        except MissingObject:
            return None
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`. Folders that become empty go with it."""
        path = self._path(key)
        if not self._within(path.parent):
            return
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        for folder in path.parents:
            if folder == self._root:
                return
            try:
                folder.rmdir()
            except OSError:
                return
            self._durable.discard(folder)

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        check_prefix(key)
        return f"file://{quote(str(self._root))}/{quote(key)}"

    def _path(self, key: str) -> Path:
        if check_key(key).split("/", 1)[0] == _STAGING:
            raise ValueError(f"object key {key!r}: {_STAGING} is the store's own")
        return self._root / key

    def _within(self, folder: Path) -> bool:
        real = Path(os.path.realpath(folder))
        return real == self._real / folder.relative_to(self._root)

    def _open(self, key: str) -> int:
        path = self._path(key)
        missing = MissingObject(f"no object {key!r} in {self._root}")
        if not self._within(path.parent):
            raise missing
        try:
            # Non-blocking, so that a FIFO cannot hold up the reader before it is found out.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise missing from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise missing
        return descriptor

    @contextmanager
    def _staged(self, body: Body) -> Iterator[Path]:
        """A new file of the store's own with this content, on the disk, and held: `tidy` leaves it alone. Then gone."""
        staging = self._root / _STAGING
        _make_folders(staging)
        while True:
            temporary = staging / uuid.uuid4().hex
            descriptor = os.open(temporary, _NEW, 0o666)
            # One that was taken for abandoned before it was held is no file any more.
            if _locked(descriptor) is not False and os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
        try:
            _write(descriptor, body)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)

    def _place(self, path: Path, key: str, step: Callable[[], object]) -> None:
        """Make the folders above `path`, take the `step` that gives it its name, and make that durable."""
        for race in range(_RACES):
            try:
                made = _make_folders(path.parent)
                if not self._within(path.parent):
                    raise ValueError(f"object key {key!r}: a symbolic link is on its way")
                step()
            except FileNotFoundError:
                if race + 1 < _RACES:
                    continue
                raise
            except FileExistsError:
                if path.parent.is_dir() and not path.is_dir():
                    raise
                raise _clash(key) from None
            except (NotADirectoryError, IsADirectoryError):
                raise _clash(key) from None
            self._durable.difference_update(made)
            self._settle(path.parent)
            return

    def _settle(self, folder: Path) -> None:
        """Make what is in `folder` durable, its own name, and those of the folders above it.

        Also of those that were there: whoever made them may have been killed before they were durable.
        """
        _sync_folder(folder)
        found: list[Path] = []
        while folder not in self._durable and folder != folder.parent:
            found.append(folder)
            inside = folder != self._root and self._root in folder.parents
            if not inside and os.path.ismount(folder):
                break
            try:
                _sync_folder(folder.parent)
            except PermissionError:
                # Only those above the root, which are somebody else's, need not be readable.
                if inside:
                    raise
            folder = folder.parent
        self._durable.update(found)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        found: list[tuple[str, os.DirEntry[str]]] = []
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    # A folder sorts as its keys do: with the slash.
                    key = folder + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                    found.append((key, entry))
        except (FileNotFoundError, NotADirectoryError):
            return
        for key, entry in sorted(found, key=lambda pair: os.fsencode(pair[0])):
            if key.endswith("/"):
                if key == f"{_STAGING}/":
                    continue
                below = key.startswith(prefix) or prefix.startswith(key)
                if below and (key > after or after.startswith(key)):
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after and entry.is_file(follow_symlinks=False):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield ObjectInfo(key, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _clash(key: str) -> ValueError:
    return ValueError(f"object key {key!r}: an object and a folder cannot have the same name")


def _locked(descriptor: int) -> bool | None:
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


def _advise(descriptor: int, advice: str) -> None:
    """Tell the kernel how a file is used, where it can be told. What a file system does not take fails nothing."""
    number = getattr(os, advice, None)
    if number is not None:
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, number)


def _abandoned(descriptor: int) -> bool:
    locked = _locked(descriptor)
    return os.fstat(descriptor).st_mtime < time.time() - _ABANDONED_S if locked is None else locked


def _write(descriptor: int, body: Body) -> None:
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


def _make_folders(folder: Path) -> list[Path]:
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


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # A delete took it away again, and the object with it.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
