"""An object store in a folder of a file system. What is not a regular file below the folder is no object."""

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from infra.objects.store import MissingObject, ObjectInfo, check_key, check_prefix

_STAGING = ".staging"
_NO_OBJECT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR}
"""Absent, below a file, a link, a socket, a folder."""
_RACES = 100
"""How often a put is tried again whose folder a delete removed under it."""


class FileStore:
    """Objects are files below `root`. A put writes and syncs a file aside, then renames it.

    Tasks may write below `root` themselves, so symbolic links there are never followed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._real = Path(os.path.realpath(self._root))

    def put(self, key: str, body: bytes | Path) -> None:
        """See `ObjectStore.put`."""
        path = self._path(key)
        staging = self._root / _STAGING
        staging.mkdir(parents=True, exist_ok=True)
        temporary = staging / uuid.uuid4().hex
        try:
            with temporary.open("wb") as file:
                if isinstance(body, bytes):
                    file.write(body)
                else:
                    with body.open("rb") as source:
                        shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            self._rename(temporary, path, key)
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with os.fdopen(self._open(key), "rb") as file:
            return file.read()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `ObjectStore.get_range`."""
        with os.fdopen(self._open(key), "rb") as file:
            file.seek(start)
            return file.read(max(0, end - start))

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

    def _rename(self, temporary: Path, path: Path, key: str) -> None:
        for race in range(_RACES):
            try:
                made = _make_folders(path.parent)
                if not self._within(path.parent):
                    raise ValueError(f"object key {key!r}: a symbolic link is on its way")
                temporary.replace(path)
            except FileNotFoundError:
                if race + 1 < _RACES:
                    continue
                raise
            except (NotADirectoryError, FileExistsError, IsADirectoryError):
                raise ValueError(f"object key {key!r}: an object and a folder cannot have the same name") from None
            for folder in made:
                _sync_folder(folder)
            return

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


def _make_folders(folder: Path) -> list[Path]:
    """Make `folder` and its parents; returns the folders to sync: it and every one that got a new entry."""
    made = [folder]
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
        made.append(folder)
    for absent in reversed(missing):
        try:
            absent.mkdir()
        except FileExistsError:
            # Another writer's folder, unless a delete has taken that away already: then there is none, which is told.
            if not stat.S_ISDIR(absent.lstat().st_mode):
                raise
    return made


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # A delete took it away again, and the object with it.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
