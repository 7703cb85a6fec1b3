"""Reads a fixed version of an object from an S3 bucket, with retries of truncated bodies."""

import re
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
from mizzen.objects.store import ChangedObject, MissingObject

ABSENT = {"404", "NoSuchKey", "NotFound"}
CHANGED = {"412", "PreconditionFailed"}
CUTS = (CutBody, IncompleteReadError, ReadTimeoutError, ResponseStreamingError, OSError)
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
        return fill(into, lambda done: self.ranged(start + done, start + len(into)), CUTS)

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
            if code in CHANGED or (code in ABSENT and self._tag):
                raise ChangedObject(of.words) from None
            if code in ABSENT:
                raise MissingObject(f"no object at {of.words}") from None
            raise
        self._tag = said["ETag"].strip('"')
        with said["Body"] as body:
            found = _RANGE.fullmatch(said.get("ContentRange", ""))
            if not found or int(found[1]) != start or int(found[2]) != min(end, int(found[3])) - 1:
                raise OSError(f"{of.words}: requested bytes {start}-{end - 1}, got {said.get('ContentRange')!r}")
            yield Exactly(body, int(found[2]) + 1 - start)


class _Nothing:
    """An empty body, for a range beyond the object's end."""

    def readinto(self, into: memoryview) -> int:
        return 0


class Exactly:
    """A body of known size; raises `CutBody` if it ends early."""

    def __init__(self, body: Any, size_bytes: int) -> None:
        self._body, self._left = body, size_bytes

    def readinto(self, into: memoryview) -> int:
        """See `Readable`."""
        count = int(self._body.readinto(into[: self._left])) if self._left else 0
        if self._left and not count:
            raise CutBody(f"{self._left} bytes are missing at the end of the body")
        self._left -= count
        return count
