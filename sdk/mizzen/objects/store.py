"""Defines the interface of object stores, and the rules for keys."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

STAGING = ".staging"
"""Key prefix that is reserved for unfinished writes."""

Chunk: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = bytes | Path | Sequence[Chunk]
"""Bytes, a file whose content is stored, or a sequence of buffers. Buffers may be read more than once."""

Fetch: TypeAlias = Callable[[memoryview, int], int]
"""Fills a writable buffer from an offset of the object, and returns the number of bytes read: fewer at its end."""


class MissingObject(LookupError):
    """There is no object under the key. `args[0]` is a message with the key and the store."""


class ChangedObject(Exception):
    """The requested version of the object no longer exists: the object was replaced or removed."""


class ObjectInfo(NamedTuple):
    """One object in a listing."""

    key: str
    size_bytes: int
    tag: str
    """Version identifier, which changes when the object is replaced: an ETag, or size, modification time and inode."""


class ObjectStore(Protocol):
    """Stores objects by key, a relative path such as `logs/wl-1/0.log`. Readers never see a partial object."""

    is_local: bool = False
    """Whether an object is read from the file system or memory, so that a second read costs little."""
    is_volatile: bool = False
    """Whether objects may be lost at any time, so that their loss is no error of the root."""
    has_peer: bool = False
    """Whether a peer machine has taken all objects since this was last set to True."""

    def put(self, key: str, body: Body) -> None:
        """Store `body` under `key`, durably. Replaces an existing object."""

    def create(self, key: str, body: bytes) -> bool:
        """Store `body` under `key`, durably, if there is no object yet. Return whether this call created the object.

        Of several concurrent creators only one succeeds. `body` must be unique to its creator: if the response is lost,
        the creator compares the stored object with `body` to find out whether it was created.
        """

    def get(self, key: str) -> bytes:
        """Return the object's content.

        Raises:
            MissingObject: there is no such object.
        """

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to, but not including, `end`; fewer if the object ends before.

        Raises:
            MissingObject: there is no such object.
        """

    def opened(self, key: str) -> AbstractContextManager[Fetch]:
        """Open the object for reading in pieces, roughly in order, by several threads concurrently.

        Raises:
            MissingObject: there is no such object. Some stores raise this only at the first fetch.
        """

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Return the objects under several keys, None if there is none. Use `stat` for keys that the result omits."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose keys start with `prefix` (any string) and sort after `after`, sorted by key."""

    def size(self, key: str) -> int | None:
        """Return the size in bytes; None if there is no such object."""
        found = self.stat(key)
        return None if found is None else found.size_bytes

    def stat(self, key: str) -> ObjectInfo | None:
        """Return size and tag; None if there is no such object."""

    def delete(self, key: str) -> None:
        """Remove the object. Does nothing if there is none."""

    def forget(self, key: str) -> None:
        """Drop the object, which will not be read again before its removal, from this machine's page cache."""

    def tidy(self) -> None:
        """Remove temporary files of writers that died. Does nothing for stores that have none."""

    def uri(self, key: str) -> str:
        """Return the URI of the object, or of the folder if the key ends in `/`."""


def check_key(key: str) -> str:
    """Check a key and return it: a relative path without empty, `.` or `..` parts, and not below `.staging`.

    Raises:
        ValueError: the key is invalid.
    """
    if key.split("/", 1)[0] == STAGING:
        raise ValueError(f"object key {key!r}: {STAGING} is reserved for the store")
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"object key {key!r}: must be a relative path without empty, '.' or '..' parts")
    return key


def check_prefix(prefix: str) -> str:
    """Check that keys can start with `prefix`, and return it.

    Raises:
        ValueError: the prefix is invalid.
    """
    *folders, _ = prefix.split("/")
    if "\0" in prefix or any(part in ("", ".", "..") for part in folders):
        raise ValueError(f"object prefix {prefix!r}: must be the start of a relative path without '.' or '..' parts")
    return prefix


def holds(store: ObjectStore, key: str, body: bytes) -> bool:
    """Return whether the object has exactly this content. Tells a creator whose response was lost if it succeeded."""
    try:
        return store.get(key) == body
    except MissingObject:
        return False


def chunks_of(body: bytes | Sequence[Chunk]) -> list[memoryview]:
    """Return the non-empty buffers of an in-memory body, as flat byte views."""
    given = [body] if isinstance(body, bytes | bytearray | memoryview) else body
    views = (memoryview(chunk).cast("B") for chunk in given if memoryview(chunk).nbytes)
    return list(views)
