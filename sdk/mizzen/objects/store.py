"""Defines the interfaces of object stores and of resumable uploads, and the rules for keys.

The target store of a copy keeps an unfinished upload under the plan's mark, so a process with the same plan finds the
parts that are already uploaded. A part counts as uploaded when the store itself has confirmed its content. The object
is not visible before `finish`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from mizzen.objects.copy_errors import CopyFailed
from mizzen.objects.store_digest import StoreDigest

STAGING = ".staging"
"""Key prefix that is reserved for the stores' unfinished uploads."""

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


class ObjectStat(NamedTuple):
    """Size, version and origin of one object."""

    size_bytes: int
    tag: str
    """Version identifier, see `ObjectInfo.tag`."""
    mark: str
    """The id (`CopyPlan.mark`) of the copy that created the object, if it is unchanged since; else empty."""


class Content(NamedTuple):
    """The complete content of one version of an object."""

    body: bytearray
    store_digest: StoreDigest | None
    """The store's digest, not yet compared with `body`; None if there is none that this process can compute."""


Read: TypeAlias = Callable[[], bytearray]
"""Reads and returns one part of the source."""


@dataclass(frozen=True)
class CopyPlan:
    """A copy: one version of a source object, and its key at the target."""

    source: "ObjectStore"
    source_key: str
    source_tag: str
    size_bytes: int
    key: str
    """Key at the target."""
    part_bytes: int
    """Size of every part except the last."""
    mark: str
    """Id of the upload. The finished object carries it as `ObjectStat.mark`, if the store supports metadata."""

    @property
    def parts(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.size_bytes // self.part_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """Return start and end offset of part `number`, counted from 0. The end is exclusive."""
        start = number * self.part_bytes
        return start, min(start + self.part_bytes, self.size_bytes)

    def damaged(self, number: int, found: str, expected: str) -> CopyFailed:
        """Return the error for a part whose digest at the target differs from the one in the source."""
        where = self.describe_part(number)
        return CopyFailed(f"{where} is {found}, in {self.source.uri(self.source_key)} it is {expected}")

    def describe_part(self, number: int) -> str:
        """Return a description of a part for messages."""
        return f"{self.key}: part {number + 1} of {self.parts} at the target"


class Upload(Protocol):
    """A resumable upload of one object. Several threads may upload different parts concurrently."""

    plan: CopyPlan
    """The plan, which may have other parts than the caller's: a server-side copy may treat the object as one part."""
    copies_itself: bool = False
    """Whether the store copies the parts server-side, so that they need not be read here."""
    proof: str = ""
    """After `finish`: the algorithm by which the store compared a server-side copy with the digest of the source store.
    Empty if it did not, or if the parts were read here."""

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not uploaded yet, in order."""

    def take(self, number: int, read: Read) -> None:
        """Upload a part, durably, and let the store confirm its content. Calls `read` unless the store copies the part.

        Raises:
            CopyFailed: the store reports another content, or the upload was removed.
        """

    def stored(self, number: int) -> bytearray | None:
        """Return the content of an uploaded part; None if the store cannot read it before the object is finished."""
        return None

    def finish(self) -> bool:
        """Assemble the object from its parts. Return whether it is verified to equal the source.

        If it returns False, the object has no mark, and the caller must compare it with the source. The content is
        durable; its name only after `ObjectStore.make_durable`.

        Raises:
            CopyFailed: a part differs from what was uploaded.
        """

    def drop(self) -> None:
        """Remove all uploaded parts."""


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

    def content(self, info: ObjectInfo) -> Content:
        """Read this version of a small object in one request. A truncated response is resumed.

        Raises:
            ChangedObject: the object was replaced or removed.
        """

    def store_digest(self, info: ObjectInfo) -> StoreDigest | None:
        """Return the store's own digest of this version; None if there is none that this process can compute."""

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Return the objects under several keys, None if there is none. Use `stat` for keys that the result omits."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose keys start with `prefix` (any string) and sort after `after`, sorted by key."""

    def size(self, key: str) -> int | None:
        """Return the size in bytes; None if there is no such object."""
        found = self.stat(key)
        return None if found is None else found.size_bytes

    def stat(self, key: str) -> ObjectStat | None:
        """Return size, tag and mark; None if there is no such object."""

    def upload(self, plan: CopyPlan) -> AbstractContextManager[Upload]:
        """Start an upload in parts, or resume the unfinished upload with the same `plan.mark`.

        Raises:
            CopyInUse: another process works on the same upload. Not every store can detect this.
        """

    def make_durable(self, keys: Iterable[str]) -> None:
        """Make the names of finished uploads durable. Before this call, a power loss may undo them."""

    def tidy_uploads(self, idle_s: float) -> None:
        """Remove abandoned uploads: those that received no part for `idle_s` seconds and are not in use."""

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
