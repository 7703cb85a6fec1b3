"""Copies objects of buckets into folders: `python -m mizzen.objects.fetch URL PATH ... -- COMMAND`.

Each URL names an object, or a folder of a bucket, whose objects are copied with the names that they have in it. Then
COMMAND, if it is given, replaces this process.
"""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from mizzen.objects.copy import Wanted, copy_object, copy_objects
from mizzen.objects.files import FileStore
from mizzen.objects.urls import open_store

_NAME = "fetch"


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
        path.parent.mkdir(parents=True, exist_ok=True)
        copy_object(above, FileStore(path.parent), last, name=_NAME, to=path.name)
        return found.size_bytes
    source = open_store(url)
    # Consoles of clouds make empty objects whose names end in a slash, to show folders.
    wanted = [Wanted(one.key, one.size_bytes) for one in source.list("") if not one.key.endswith("/")]
    if not wanted:
        raise NothingThere(f"{url}: the bucket has no such object and no such folder")
    path.mkdir(parents=True, exist_ok=True)
    return copy_objects(source, FileStore(path), wanted, name=_NAME)


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
