"""An object store in a folder of a file system. Only the regular files below the folder are objects."""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from mizzen.objects.disk import (
    FairLock,
    abandoned,
    advise,
    held,
    in_memory,
    lock,
    make_folders,
    read,
    sync_folder,
    write,
)
from mizzen.objects.store import (
    STAGING,
    Body,
    Fetch,
    MissingObject,
    ObjectInfo,
    ObjectStore,
    check_key,
    check_prefix,
    holds,
)

_NO_OBJECT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR}
"""Errors of paths that are no objects: missing, below a file, a symbolic link, a socket, a folder."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems without hard links, such as some network mounts of buckets."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_STATS = 256
"""Objects of a listing that are looked up at once."""
UPLOADS = ".upload"
"""Suffix of the staged files of copies, which are kept until they have been idle for long."""
_RACES = 100
"""Tries of a put if concurrent deletes remove its folder."""


class FileStore(ObjectStore):
    """Stores objects as files below `root`. A put writes and syncs a temporary file, then renames it.

    Tasks may write below `root` directly, so symbolic links there are never followed.
    """

    is_local = True

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._durable: set[Path] = set()
        """Folders whose directory entries, and those of all parent folders, are durable."""

    def put(self, key: str, body: Body) -> None:
        """Store an object; see `ObjectStore.put`."""
        path = self._path(key)
        with self._staged(body) as temporary:
            self._place(path, key, temporary.replace)
            self._make_durable(path.parent)

    def create(self, key: str, body: bytes) -> bool:
        """Create an object if its key is free; see `ObjectStore.create`.

        Uses a hard link, which is atomic also between machines that share the folder.
        On a file system without hard links the file is created in place. Still only one creator succeeds, but readers
        may see the file before it is complete.
        """
        path = self._path(key)
        with self._staged(body) as temporary:

            def link(place: Path) -> None:
                try:
                    os.link(temporary, place, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    descriptor = os.open(place, _NEW, 0o666)
                    try:
                        write(descriptor, body)
                    except OSError:
                        place.unlink(missing_ok=True)
                        raise
                    finally:
                        os.close(descriptor)

            try:
                self._place(path, key, link)
                self._make_durable(path.parent)
            except FileExistsError:
                # A network file system may report this for its own link, if it lost the first response and retried.
                return holds(self, key, body)
        return True

    def file(self, key: str) -> BinaryIO:
        """Open the file of an object for reading.

        Raises:
            MissingObject: there is no such object.
        """
        return os.fdopen(self._open(key), "rb")

    def forget(self, key: str) -> None:
        """Drop an object from the page cache; see `ObjectStore.forget`."""
        with suppress(OSError, MissingObject), self.file(key) as file:
            advise(file.fileno(), "POSIX_FADV_DONTNEED")

    def tidy(self) -> None:
        """Remove temporary files that no writer has locked; see `ObjectStore.tidy`."""
        for path in self._staging():
            if path.suffix != UPLOADS:
                remove_if(path, abandoned)

    def get(self, key: str) -> bytes:
        """Return an object's content; see `ObjectStore.get`."""
        with self.file(key) as file:
            return file.read()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of an object; see `ObjectStore.get_range`."""
        with self.file(key) as file:
            file.seek(start)
            return file.read(max(0, end - start))

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        """Open an object for reading in pieces; see `ObjectStore.opened`.

        Cached pages are copied by several threads; other pages are read sequentially.
        The kernel's readahead works only for sequential reads: several threads, or reads out of order, are slower. So
        after the first page that is not in the page cache, all further reads take turns, in order: the next pages may
        be cached only because of readahead.
        """
        with ExitStack() as stack:
            descriptor = self._open(key)
            stack.callback(os.close, descriptor)
            probe = self._open(key)
            stack.callback(os.close, probe)
            advise(descriptor, "POSIX_FADV_SEQUENTIAL")
            advise(probe, "POSIX_FADV_RANDOM")  # A probe must not cause readahead.
            turns, cold = FairLock(), threading.Event()

            def fetch(into: memoryview, start: int) -> int:
                if not cold.is_set() and not in_memory(probe, start):
                    cold.set()
                with turns.turn() if cold.is_set() else nullcontext():
                    return read(descriptor, into, start)

            yield fetch

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Look up several keys; see `ObjectStore.stat_all`. Each folder is opened only once."""
        found = dict[str, ObjectInfo | None].fromkeys(keys)
        for folder, some in groupby(sorted(map(check_key, keys), key=_folder_of), _folder_of):
            found |= self._infos(folder, some)
        return found

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List objects by prefix; see `ObjectStore.list`."""
        folder, _, _ = check_prefix(prefix).rpartition("/")
        yield from self._walk(f"{folder}/" if folder else "", prefix, after)

    def stat(self, key: str) -> ObjectInfo | None:
        """Return size and tag of an object; see `ObjectStore.stat`."""
        try:
            descriptor = self._open(key)
        except MissingObject:
            return None
        try:
            status = os.fstat(descriptor)
            return ObjectInfo(key, status.st_size, tag_of(status))
        finally:
            os.close(descriptor)

    def delete(self, key: str) -> None:
        """Remove an object; see `ObjectStore.delete`. Also removes folders that become empty."""
        path = self._path(key)
        try:
            with held(self._root, path.parent) as place:
                (place / path.name).unlink()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        for folder in path.parents:
            if folder == self._root:
                return
            try:
                with held(self._root, folder.parent) as place:
                    (place / folder.name).rmdir()
            except OSError:
                return
            self._durable.discard(folder)

    def uri(self, key: str) -> str:
        """Return an object's URI; see `ObjectStore.uri`."""
        check_prefix(key)
        return f"file://{quote(str(self._root))}/{quote(key)}"

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _within(self, folder: Path) -> bool:
        """Return whether the path from the root to `folder` contains no symbolic link."""
        way = str(self._root)
        for part in folder.parts[len(self._root.parts) :]:
            way = f"{way}/{part}"
            with suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISLNK(os.lstat(way).st_mode):
                    return False
        return True

    def _open(self, key: str) -> int:
        path = self._path(key)
        missing = MissingObject(f"no object {key!r} in {self._root}")
        try:
            with held(self._root, path.parent) as place:
                # Non-blocking, because opening a FIFO would block before its type can be checked.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                descriptor = os.open(place / path.name, flags)
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise missing from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise missing
        return descriptor

    def _staging(self) -> Iterator[Path]:
        with suppress(FileNotFoundError, NotADirectoryError), held(self._root, self._root / STAGING) as staging:
            yield from list(staging.iterdir())

    @contextmanager
    def _staged(self, body: Body) -> Iterator[Path]:
        """Write the content to a new, locked temporary file and sync it. On exit, remove the file."""
        make_folders(self._root)
        with held(self._root, self._root / STAGING, []) as staging:
            while True:
                temporary = staging / os.urandom(16).hex()
                descriptor = os.open(temporary, _NEW, 0o666)
                # If `tidy` removed the file before it was locked, it has no links: create another one.
                if lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                    break
                os.close(descriptor)
            try:
                write(descriptor, body)
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)
                os.close(descriptor)

    def _place(self, path: Path, key: str, step: Callable[[Path], object]) -> None:
        """Create the folders above `path` and run `step`, which creates its name. Durable only after `_make_durable`.

        `step` gets a path that leads to the same folder (`held`).
        """
        for race in range(_RACES):
            try:
                made = make_folders(self._root)
                with held(self._root, path.parent, made) as place:
                    step(place / path.name)
            except FileNotFoundError:
                if race + 1 < _RACES:
                    continue
                raise
            except FileExistsError:
                if path.parent.is_dir() and not path.is_dir():
                    raise
                raise _clash(key) from None
            except (NotADirectoryError, IsADirectoryError):
                if not self._within(path.parent):
                    raise ValueError(f"object key {key!r}: its path contains a symbolic link") from None
                raise _clash(key) from None
            self._durable.difference_update(made)
            return

    def _make_durable(self, folder: Path) -> None:
        """Sync `folder` and the folders above it, so that all names on the path are durable.

        Existing folders are synced too: their creator may have been killed before it synced them.
        """
        sync_folder(folder)
        found: list[Path] = []
        while folder not in self._durable and folder != folder.parent:
            found.append(folder)
            inside = folder != self._root and self._root in folder.parents
            if not inside and os.path.ismount(folder):
                break
            try:
                sync_folder(folder.parent)
            except PermissionError:
                # Folders above the root may belong to other users and be unreadable.
                if inside:
                    raise
            folder = folder.parent
        self._durable.update(found)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        try:
            with held(self._root, self._root / folder) as place:
                with os.scandir(place) as entries:
                    # Sort a folder with its slash, as its keys sort.
                    names = [folder + one.name + ("/" if one.is_dir(follow_symlinks=False) else "") for one in entries]
                found = [key for key in names if self._is_listed(key, prefix, after)]
                found.sort(key=os.fsencode)
                infos = _infos(place, found[:_STATS])
        except (FileNotFoundError, NotADirectoryError):
            return
        for index, key in enumerate(found):
            if index and index % _STATS == 0:  # A caller may need only the first ones.
                infos = self._infos(folder, found[index : index + _STATS])
            if key.endswith("/"):
                yield from self._walk(key, prefix, after)
            elif (info := infos.get(key)) is not None:
                yield info

    @staticmethod
    def _is_listed(key: str, prefix: str, after: str) -> bool:
        if key.endswith("/"):
            below = key.startswith(prefix) or prefix.startswith(key)
            return below and (key > after or after.startswith(key)) and key != f"{STAGING}/"
        return key.startswith(prefix) and key > after

    def _infos(self, folder: str, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
        """Look up objects in one folder, which may have gone."""
        with suppress(FileNotFoundError, NotADirectoryError), held(self._root, self._root / folder) as place:
            return _infos(place, keys)
        return {}


def _infos(place: Path, keys: Iterable[str]) -> dict[str, ObjectInfo | None]:
    return {key: _info(key, place / key.rpartition("/")[2]) for key in keys if not key.endswith("/")}


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _clash(key: str) -> ValueError:
    return ValueError(f"object key {key!r}: an object and a folder cannot have the same name")


def tag_of(status: os.stat_result) -> str:
    """Return the version of a file; see `ObjectInfo.tag`."""
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def _info(key: str, path: Path) -> ObjectInfo | None:
    try:
        status = os.lstat(path)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return None
        raise
    return ObjectInfo(key, status.st_size, tag_of(status)) if stat.S_ISREG(status.st_mode) else None


def remove_if(path: Path, unneeded: Callable[[int], bool]) -> None:
    """Remove a staged file if `unneeded` returns so for its descriptor."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if unneeded(descriptor):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
