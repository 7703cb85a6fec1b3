"""Copies objects of buckets into folders: `python -m mizzen.objects.fetch URL PATH ... -- COMMAND`.

Each URL names an object, or a folder of a bucket, whose objects are copied with the names that they have in it. Then
COMMAND, if it is given, replaces this process.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from urllib.parse import urlsplit

from mizzen.objects.buffers import aligned
from mizzen.objects.store import Fetch, ObjectInfo, ObjectStore, check_key
from mizzen.objects.urls import open_store
from mizzen.objects.workers import AT_ONCE, Workers

_PIECE_BYTES = 8 << 20
_SOURCE = "user.mizzen.source"
"""Extended attribute of a file: the object, its version, and the file's modification time after the copy."""


class NothingThere(Exception):
    """A URL names no object. The message says so."""


def fetch(url: str, path: Path) -> int:
    """Copy the object or folder at a URL to a path, and return its size in bytes. Equal files are not copied again.

    Raises:
        NothingThere: the URL has neither an object nor a folder with objects, or it has an object and `path` is a
            folder.
        Exception: an error of the store, or of this machine.
    """
    parent, _, last = urlsplit(url).path.strip("/").rpartition("/")
    bucket = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    if last and (found := (above := open_store(f"{bucket}/{parent}")).stat(last)) is not None:
        if path.is_dir():
            raise NothingThere(f"{url} is an object, and {path} is a folder: write a path below ~/ for it")
        return _download(above, [(found, path)])
    source = open_store(url)
    # Consoles of clouds make empty objects whose names end in a slash, to show folders.
    wanted = [(one, path / check_key(one.key)) for one in source.list("") if not one.key.endswith("/")]
    if not wanted:
        raise NothingThere(f"{url}: the bucket has no such object and no such folder")
    return _download(source, wanted)


def _download(source: ObjectStore, wanted: list[tuple[ObjectInfo, Path]]) -> int:
    """Copy small objects concurrently, and large ones one after the other, in concurrent pieces."""
    large = [one for one in wanted if one[0].size_bytes > _PIECE_BYTES]
    with Workers(AT_ONCE) as workers, Workers(AT_ONCE) as readers:
        small = [workers.submit(_copy, source, *one) for one in wanted if one[0].size_bytes <= _PIECE_BYTES]
        for done in small:
            done.result()
        for info, path in large:
            _copy(source, info, path, readers)
    return sum(info.size_bytes for info, _ in wanted)


def _copy(source: ObjectStore, info: ObjectInfo, path: Path, readers: Workers | None = None) -> None:
    mark = f"{source.uri(info.key)} {info.tag}"
    with suppress(OSError, AttributeError):
        if os.getxattr(path, _SOURCE).decode() == f"{mark} {path.stat().st_mtime_ns}":
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".fetch-{os.getpid()}-{get_ident()}")  # As short for names of any length.
    try:
        with staged.open("wb") as file, source.opened(info.key) as read:
            starts = range(0, max(1, info.size_bytes), _PIECE_BYTES)
            if readers is None:
                count = _bring(read, file.fileno(), info, 0)
            else:
                pieces = [readers.submit(_bring, read, file.fileno(), info, start) for start in starts]
                count = sum(piece.result() for piece in pieces)
            os.fsync(file.fileno())
        if count != info.size_bytes:
            raise OSError(f"{source.uri(info.key)} changed during the copy: {count} of {info.size_bytes} bytes")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    with suppress(OSError, AttributeError):
        os.setxattr(path, _SOURCE, f"{mark} {path.stat().st_mtime_ns}".encode())


def _bring(read: Fetch, descriptor: int, info: ObjectInfo, start: int) -> int:
    piece = aligned(min(_PIECE_BYTES, info.size_bytes - start))
    count, done = read(piece, start), 0
    while done < count:
        done += os.pwrite(descriptor, piece[done:count], start + done)
    return count


def main(words: list[str]) -> None:
    """Run the module's command line. The exit status is 1, with a message, if a copy fails."""
    end = words.index("--")
    for url, path in zip(words[:end:2], words[1:end:2], strict=True):
        try:
            size_bytes = fetch(url, Path(path))
        except Exception as error:  # Of any library of a store.
            sys.exit(f"mizzen: file_mounts: {url} cannot be copied to {path}: {error}")
        print(f"mizzen: copied {url} to {path}, {size_bytes} bytes", flush=True)
    if command := words[end + 1 :]:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
