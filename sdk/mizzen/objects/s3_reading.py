"""Reads from an S3 bucket: a fixed version of an object, with retries of truncated bodies, and the digests of objects.

S3 returns digests only with whole objects, not with ranges: the checksums that were requested at the upload, and the
ETag. The ETag is an MD5, or an MD5 of the parts' MD5s, unless the object is encrypted with a KMS or customer key.
"""

import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from botocore.exceptions import (
    ClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from mizzen.objects.copy_errors import CopyFailed
from mizzen.objects.retries import CutBody, Readable, fill
from mizzen.objects.store import ChangedObject, Content, MissingObject
from mizzen.objects.store_digest import StoreDigest, algorithms

ABSENT = {"404", "NoSuchKey", "NotFound"}
_CHANGED = {"412", "PreconditionFailed"}
_CUTS = (CutBody, IncompleteReadError, ReadTimeoutError, ResponseStreamingError, OSError)
_MD5 = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class ObjectRef(NamedTuple):
    """Location of an object: client, bucket and name."""

    client: Any
    bucket: str
    name: str
    words: str
    """URI of the object, for messages."""

    @property
    def asked(self) -> dict[str, str]:
        """Parameters that name the object in requests."""
        return {"Bucket": self.bucket, "Key": self.name}


class Fetching:
    """Reads ranges of an object, all from the same version."""

    def __init__(self, of: ObjectRef, tag: str = "") -> None:
        """Read the version with the ETag `tag`; if it is empty, the version that the first request returns."""
        self._of = of
        self._tag = tag

    def __call__(self, into: memoryview, start: int) -> int:
        """Fill `into` from the offset `start`, and return the number of bytes read. See `store.Fetch`.

        Raises:
            MissingObject: there is no such object.
            ChangedObject: the object was replaced or removed after the first range was read.
        """
        return fill(into, lambda done: self.ranged(start + done, start + len(into)), _CUTS)

    @contextmanager
    def ranged(self, start: int, end: int) -> Iterator[Readable]:
        """Request a range of the object, and yield its body. A range beyond the object's end is truncated."""
        of = self._of
        match = {"IfMatch": f'"{self._tag}"'} if self._tag else {}
        try:
            said = of.client.get_object(**of.asked, **match, Range=f"bytes={start}-{end - 1}")
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "InvalidRange":
                yield _Nothing()
                return
            if code in _CHANGED or (code in ABSENT and self._tag):
                raise ChangedObject(of.words) from None
            if code in ABSENT:
                raise MissingObject(f"no object at {of.words}") from None
            raise
        self._tag = said["ETag"].strip('"')
        with said["Body"] as body:
            found = _RANGE.fullmatch(said.get("ContentRange", ""))
            if not found or int(found[1]) != start or int(found[2]) != min(end, int(found[3])) - 1:
                raise CopyFailed(f"{of.words}: requested bytes {start}-{end - 1}, got {said.get('ContentRange')!r}")
            yield _Exactly(body, int(found[2]) + 1 - start)


class _Nothing:
    """An empty body, for a range beyond the object's end."""

    def readinto(self, into: memoryview) -> int:
        return 0


class _Exactly:
    """A body of known size; raises `CutBody` if it ends early."""

    def __init__(self, body: Any, size_bytes: int) -> None:
        self._body, self._left = body, size_bytes

    def readinto(self, into: memoryview) -> int:
        count = int(self._body.readinto(into[: self._left])) if self._left else 0
        if self._left and not count:
            raise CutBody(f"{self._left} bytes are missing at the end of the body")
        self._left -= count
        return count


def content(of: ObjectRef, size_bytes: int, tag: str) -> Content:
    """Read one version of a small object; see `ObjectStore.content`.

    Raises:
        ChangedObject: the object was replaced or removed.
    """
    body = bytearray(size_bytes)
    headers: dict[str, Any] = {}
    fetching = Fetching(of, tag)

    @contextmanager
    def request(done: int) -> Iterator[Readable]:
        if done:
            with fetching.ranged(done, size_bytes) as rest:
                yield rest
            return
        try:
            said = of.client.get_object(**of.asked, IfMatch=f'"{tag}"', ChecksumMode="ENABLED")
        except ClientError as error:
            if error.response["Error"]["Code"] in _CHANGED | ABSENT:
                raise ChangedObject(of.words) from None
            raise
        with said["Body"] as whole:
            if said["ContentLength"] != size_bytes or said["ETag"].strip('"') != tag:
                raise ChangedObject(of.words)
            headers.update(said)
            yield _Exactly(whole, size_bytes)

    fill(memoryview(body), request, _CUTS)
    return Content(body, store_digest(of, size_bytes, headers))


def store_digest(of: ObjectRef, size_bytes: int, said: dict[str, Any]) -> StoreDigest | None:
    """Return the strongest digest in the response `said` of S3 that this process can compute; None if there is none."""
    found: dict[str, StoreDigest] = {}
    kind = said.get("ChecksumType", "COMPOSITE" if "-" in said["ETag"] else "FULL_OBJECT")
    for name in algorithms():
        value = str(said.get(f"Checksum{name.upper()}", ""))
        if value and kind == "FULL_OBJECT":
            found[name] = StoreDigest(name, b64decode(value).hex())
    etag = str(said["ETag"]).strip('"')
    if has_md5(said):
        value, _, parts = etag.partition("-")
        if not parts:
            found["md5"] = StoreDigest("md5", value)
        elif part_bytes := _part_bytes(of, size_bytes, int(parts)):
            found["md5"] = StoreDigest("md5", value, part_bytes)
    return next((found[name] for name in algorithms() if name in found), None)


def _part_bytes(of: ObjectRef, size_bytes: int, parts: int) -> int:
    """Return the part size of a multipart object; 0 if the parts differ in size (except the last) or it is unknown."""
    if parts == 1:
        return size_bytes
    try:
        part = of.client.head_object(**of.asked, PartNumber=1)
    except ClientError:
        return 0  # The store does not support PartNumber, so it has no digest that can be compared.
    first = int(part["ContentLength"])
    return first if first and part.get("PartsCount", parts) == parts == -(-size_bytes // first) else 0


def has_md5(said: dict[str, Any]) -> bool:
    """Return whether the ETag is an MD5, or an MD5 of MD5s. It is not if a KMS or customer key encrypts the object, nor
    in every compatible store.

    Even then, the store has compared the uploaded bytes with the MD5 and CRC-32 of the request.
    """
    keys = str(said.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in said
    return not keys and _MD5.fullmatch(said["ETag"].strip('"')) is not None
