"""Reading from an S3 bucket: one version of an object, bodies that are cut, and the digests that S3 has of it.

S3 tells digests with whole objects only, never with ranges: the ETag, which is an MD5 or one of the MD5s of parts
unless a key of KMS or of the customer encrypts the object, and the checksums that were asked for when it was put.
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

from mizzen.objects.retries import CutBody, Readable, fill
from mizzen.objects.store import ChangedObject, Content, MissingObject
from mizzen.objects.uploads import CopyFailed
from mizzen.objects.vouched import Vouched, algorithms

ABSENT = {"404", "NoSuchKey", "NotFound"}
_CHANGED = {"412", "PreconditionFailed"}
_CUTS = (CutBody, IncompleteReadError, ReadTimeoutError, ResponseStreamingError, OSError)
_MD5 = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Object(NamedTuple):
    """An object in a bucket."""

    client: Any
    bucket: str
    name: str
    words: str
    """How messages name it."""

    @property
    def asked(self) -> dict[str, str]:
        """How requests name it."""
        return {"Bucket": self.bucket, "Key": self.name}


class Fetching:
    """Reads ranges of an object. All are of one version, whatever replaces the object meanwhile."""

    def __init__(self, of: Object, tag: str = "") -> None:
        """`tag`: of the version that is read; empty: the one that the first range finds."""
        self._of = of
        self._tag = tag

    def __call__(self, into: memoryview, start: int) -> int:
        """See `store.Fetch`.

        Raises:
            MissingObject: there is no such object.
            ChangedObject: it was replaced or removed after the first range was read.
        """
        return fill(into, lambda done: self.ranged(start + done, start + len(into)), _CUTS)

    @contextmanager
    def ranged(self, start: int, end: int) -> Iterator[Readable]:
        """The body of these bytes, clipped at the object's end."""
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
                raise CopyFailed(f"{of.words}: asked for bytes {start}-{end - 1}, got {said.get('ContentRange')!r}")
            yield _Exactly(body, int(found[2]) + 1 - start)


class _Nothing:
    """A body behind the object's end."""

    def readinto(self, into: memoryview) -> int:
        return 0


class _Exactly:
    """A body that has so many bytes; an error if it ends before."""

    def __init__(self, body: Any, size_bytes: int) -> None:
        self._body, self._left = body, size_bytes

    def readinto(self, into: memoryview) -> int:
        count = int(self._body.readinto(into[: self._left])) if self._left else 0
        if self._left and not count:
            raise CutBody(f"{self._left} bytes are missing at the end of the body")
        self._left -= count
        return count


def content(of: Object, size_bytes: int, tag: str) -> Content:
    """See `ObjectStore.content`.

    Raises:
        ChangedObject: see there.
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
    return Content(body, vouched(of, size_bytes, headers))


def vouched(of: Object, size_bytes: int, said: dict[str, Any]) -> Vouched | None:
    """The strongest digest in what S3 has `said` of an object that can be computed here."""
    found: dict[str, Vouched] = {}
    kind = said.get("ChecksumType", "COMPOSITE" if "-" in said["ETag"] else "FULL_OBJECT")
    for name in algorithms():
        value = str(said.get(f"Checksum{name.upper()}", ""))
        if value and kind == "FULL_OBJECT":
            found[name] = Vouched(name, b64decode(value).hex())
    etag = str(said["ETag"]).strip('"')
    if has_md5(said):
        value, _, parts = etag.partition("-")
        if not parts:
            found["md5"] = Vouched("md5", value)
        elif part_bytes := _part_bytes(of, size_bytes, int(parts)):
            found["md5"] = Vouched("md5", value, part_bytes)
    return next((found[name] for name in algorithms() if name in found), None)


def _part_bytes(of: Object, size_bytes: int, parts: int) -> int:
    """The size of all parts but the last of a multipart object; 0: they are not of one size, or S3 does not say."""
    if parts == 1:
        return size_bytes
    try:
        part = of.client.head_object(**of.asked, PartNumber=1)
    except ClientError:
        return 0  # A store that does not know the parameter. What its objects are is then not vouched for.
    first = int(part["ContentLength"])
    return first if first and part.get("PartsCount", parts) == parts == -(-size_bytes // first) else 0


def has_md5(said: dict[str, Any]) -> bool:
    """Whether the ETag is an MD5, or one of MD5s: not with keys of KMS or of the customer, nor in every store.

    There, the store has still compared what it was sent with the MD5 and CRC-32 sent along.
    """
    keys = str(said.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in said
    return not keys and _MD5.fullmatch(said["ETag"].strip('"')) is not None
