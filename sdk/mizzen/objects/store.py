"""The interface of an object store, the rules for keys, and the opening of a store by its URL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from mizzen.objects.uploads import Plan, Upload
from mizzen.objects.vouched import Vouched

STAGING = ".staging"
"""The first part of keys that are the stores' own: what is not an object yet."""

Chunk: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = bytes | Path | Sequence[Chunk]
"""Bytes, the content of a file, or buffers one after the other, which may be read more than once."""

Fetch: TypeAlias = Callable[[memoryview, int], int]
"""Fills writable bytes from a byte of the object on, and says how many were filled: fewer at the object's end."""


class MissingObject(LookupError):
    """There is no object under the key; `args[0]` says which and where."""


class ChangedObject(Exception):
    """The object is not the version that was asked for: it was replaced or removed meanwhile."""


class ObjectInfo(NamedTuple):
    """One object of a listing."""

    key: str
    size_bytes: int
    tag: str
    """Changes when the object is replaced: an ETag, or size, modification time and inode."""


class ObjectStat(NamedTuple):
    """One object."""

    size_bytes: int
    tag: str
    """As in `ObjectInfo`."""
    mark: str
    """The mark of the copy that made it, if it was one and has not been changed since; else empty."""


class Content(NamedTuple):
    """One version of an object, whole."""

    body: bytearray
    vouched: Vouched | None
    """What the store says of it, not yet compared with `body`; None: nothing that can be computed here."""


class ObjectStore(Protocol):
    """Objects under keys: relative paths with `/`, such as `logs/wl-1/0.log`. A reader sees an object whole or not."""

    def put(self, key: str, body: Body) -> None:
        """Store `body` under `key`, durably, in place of what was there."""

    def create(self, key: str, body: bytes) -> bool:
        """Store `body` under `key`, durably, unless there is an object: then False, and nothing has changed.

        Of several that create the same object at the same time, one does. `body` must hold something that no other
        creator's has: it is how one whose answer was lost on its way finds that the object is its own.
        """

    def get(self, key: str) -> bytes:
        """The object's content.

        Raises:
            MissingObject: there is none.
        """

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes `start` up to but without `end`, clipped at the object's size.

        Raises:
            MissingObject: there is none.
        """

    def opened(self, key: str) -> AbstractContextManager[Fetch]:
        """The object, for reading it piece by piece, by several threads at once and about in order.

        Raises:
            MissingObject: there is none; where a store opens nothing, a fetch raises it.
        """

    def content(self, info: ObjectInfo) -> Content:
        """This version of an object, whole, in one request: for small ones. Bodies that are cut are continued.

        Raises:
            ChangedObject: it is another version now, or gone.
        """

    def vouched(self, info: ObjectInfo) -> Vouched | None:
        """The store's own digest of this version of an object; None: it has none that can be computed here."""

    def look(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """What is under these keys, None where there is nothing; keys that are left out must be looked up by `stat`."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix` (any string, not only a folder) and sort after `after`, by key."""

    def size(self, key: str) -> int | None:
        """Size in bytes; None: there is no such object."""

    def stat(self, key: str) -> ObjectStat | None:
        """Size, tag and mark; None: there is no such object."""

    def upload(self, plan: Plan) -> AbstractContextManager[Upload]:
        """Begin to put an object part by part, or go on with what was begun under the plan's mark.

        Raises:
            CopyInUse: another process is at it, where a store can tell.
        """

    def settle(self, keys: Iterable[str]) -> None:
        """Make durable that finished uploads have their names: until then a power loss may take the names again."""

    def tidy_uploads(self, idle_s: float) -> None:
        """Remove uploads that got no part for `idle_s`: nobody goes on with them. None that is in use."""

    def delete(self, key: str) -> None:
        """Remove the object, if it is there."""

    def forget(self, key: str) -> None:
        """It will be removed soon and is not read before: what this machine's memory holds of it can go."""

    def tidy(self) -> None:
        """Remove what writers that died left behind and no reader sees, where a store has such."""

    def uri(self, key: str) -> str:
        """Where a task finds the object, or (with a key that ends in `/`) the folder."""


def check_key(key: str) -> str:
    """`key`, if it can name an object: a relative path without empty, `.` or `..` parts, not below `.staging`.

    Raises:
        ValueError: it cannot.
    """
    if key.split("/", 1)[0] == STAGING:
        raise ValueError(f"object key {key!r}: {STAGING} is the store's own")
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"object key {key!r}: must be a relative path without empty, '.' or '..' parts")
    return key


def check_prefix(prefix: str) -> str:
    """`prefix`, if keys can start with it.

    Raises:
        ValueError: they cannot.
    """
    *folders, _ = prefix.split("/")
    if "\0" in prefix or any(part in ("", ".", "..") for part in folders):
        raise ValueError(f"object prefix {prefix!r}: must be the start of a relative path without '.' or '..' parts")
    return prefix


def holds(store: ObjectStore, key: str, body: bytes) -> bool:
    """Whether the object is there with just this content: how a creator whose answer was lost finds its own."""
    try:
        return store.get(key) == body
    except MissingObject:
        return False


def chunks_of(body: bytes | Sequence[Chunk]) -> list[memoryview]:
    """The bytes of a body that is in memory, as flat views without empty ones."""
    given = [body] if isinstance(body, bytes | bytearray | memoryview) else body
    views = (memoryview(chunk).cast("B") for chunk in given if memoryview(chunk).nbytes)
    return list(views)


def open_store(url: str) -> ObjectStore:
    """The store at `file:///absolute/folder`, `s3://bucket/prefix` or `gs://bucket/prefix`.

    Credentials, region and endpoint (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`) are taken from where the tools of AWS
    and Google take them.

    Raises:
        ValueError: the scheme is another one, or the URL does not name a folder or bucket.
        ModuleNotFoundError: the library for the scheme is not installed; the message says what to install.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"bucket URL {url!r}: must be file:///absolute/folder, without a host")
        from mizzen.objects.files import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme not in ("s3", "gs"):
        raise ValueError(f"bucket URL {url!r}: the scheme must be file, s3 or gs, it is {parts.scheme!r}")
    if not parts.netloc:
        raise ValueError(f"bucket URL {url!r}: must be {parts.scheme}://bucket or {parts.scheme}://bucket/prefix")
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
