"""Defines the object store interface and the rules for keys, and opens a store by its URL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from mizzen.objects.store_digest import StoreDigest
from mizzen.objects.uploads import CopyPlan, Upload

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


class ObjectStore(Protocol):
    """Stores objects by key, a relative path such as `logs/wl-1/0.log`. Readers never see a partial object."""

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
        """Drop the object from this machine's page cache: it will be removed soon and not be read before."""

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


def check_url(url: str) -> None:
    """Check the form of a store's URL; see `open_store`.

    Raises:
        ValueError: the scheme is not supported, or the URL does not name a folder or bucket.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"bucket URL {url!r}: must be file:///absolute/folder, without a host")
    elif parts.scheme not in ("s3", "gs"):
        raise ValueError(f"bucket URL {url!r}: the scheme must be file, s3 or gs, not {parts.scheme!r}")
    elif not parts.netloc:
        raise ValueError(f"bucket URL {url!r}: must be {parts.scheme}://bucket or {parts.scheme}://bucket/prefix")


def open_store(url: str) -> ObjectStore:
    """Open the store at `file:///absolute/folder`, `s3://bucket/prefix` or `gs://bucket/prefix`.

    Credentials, region and endpoint (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`) are found as by the tools of AWS and
    Google.

    Raises:
        ValueError: the scheme is not supported, or the URL does not name a folder or bucket.
        ModuleNotFoundError: the client library is not installed. The message names the package to install.
    """
    check_url(url)
    parts = urlsplit(url)
    if parts.scheme == "file":
        from mizzen.objects.files import FileStore

        return FileStore(Path(unquote(parts.path)))
    prefix = unquote(parts.path).strip("/")
    try:
        if parts.scheme == "s3":
            from mizzen.objects.s3 import S3Store

            return S3Store(parts.netloc, prefix)
        from mizzen.objects.gcs import GCSStore

        return GCSStore(parts.netloc, prefix)
    except ModuleNotFoundError as error:
        extra = {"s3": "s3", "gs": "gcs"}[parts.scheme]
        message = f"{url}: needs the library {error.name}: install mizzen[{extra}]"
        raise ModuleNotFoundError(message, name=error.name) from error
