"""The interface of an object store, the rules for keys, and the opening of a store by its URL."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit


class MissingObject(LookupError):
    """There is no object under the key; `args[0]` says which and where."""


class ObjectInfo(NamedTuple):
    """One object of a listing."""

    key: str
    size_bytes: int
    tag: str
    """Changes when the object is replaced: an ETag, or size and modification time."""


class ObjectStore(Protocol):
    """Objects under keys: relative paths with `/`, such as `logs/wl-1/0.log`. A reader sees an object whole or not."""

    def put(self, key: str, body: bytes | Path) -> None:
        """Store `body` (bytes, or a file's content) under `key`, durably, in place of what was there."""

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

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix` (any string, not only a folder) and sort after `after`, by key."""

    def size(self, key: str) -> int | None:
        """Size in bytes; None: there is no such object."""

    def delete(self, key: str) -> None:
        """Remove the object, if it is there."""

    def uri(self, key: str) -> str:
        """Where a task finds the object, or (with a key that ends in `/`) the folder."""


def check_key(key: str) -> str:
    """`key`, if it can name an object: a relative path without empty, `.` or `..` parts.

    Raises:
        ValueError: it cannot.
    """
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


def open_store(url: str) -> ObjectStore:
    """The store at `file:///absolute/folder` or `s3://bucket/prefix`.

    S3 takes its credentials, region and endpoint (`AWS_ENDPOINT_URL`) from where the AWS tools take them.

    Raises:
        ValueError: the scheme is another one, or the URL does not name a folder or bucket.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"bucket URL {url!r}: must be file:///absolute/folder, without a host")
        from infra.objects.files import FileStore

        return FileStore(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        if not parts.netloc:
            raise ValueError(f"bucket URL {url!r}: must be s3://bucket or s3://bucket/prefix")
        from infra.objects.s3 import S3Store

        return S3Store(parts.netloc, unquote(parts.path).strip("/"))
    raise ValueError(f"bucket URL {url!r}: the scheme must be file or s3, it is {parts.scheme!r}")
