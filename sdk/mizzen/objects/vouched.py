"""Digests that a store publishes of its objects, and checking bytes read from it against them.

S3 and Google's storage keep a digest of each object: an MD5, a CRC or a SHA of the whole content, or a composite, which
is the digest of the digests of its parts. Bytes that were flipped between the store and this process do not have it.
"""

import hashlib
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

from mizzen.objects.uploads import CopyFailed, DamagedSource


class Vouched(NamedTuple):
    """What a store says of an object's content."""

    algorithm: str
    """One of `algorithms()`."""
    value: str
    """Hexadecimal."""
    part_bytes: int = 0
    """Of a composite: the size of all parts but the last. 0: the digest is of the content itself."""

    def __str__(self) -> str:
        """The algorithm and the digest."""
        return f"{self.algorithm}:{self.value}"


class Digest(Protocol):
    """As `hashlib` makes them."""

    def update(self, data: Any, /) -> None:
        """Take the next bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes taken."""


class _Crc:
    """A cyclic redundancy check of `size` bytes, by a function of data and the value so far."""

    def __init__(self, function: Callable[[Any, int], int], size: int) -> None:
        self._function, self._size, self._value = function, size, 0

    def update(self, data: Any) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")

    def hexdigest(self) -> str:
        return self.digest().hex()


class _Composite:
    """The digest of the digests of parts of equal size."""

    def __init__(self, algorithm: str, part_bytes: int) -> None:
        self._new, self._part_bytes = algorithms()[algorithm], part_bytes
        self._whole, self._part, self._left = self._new(), self._new(), part_bytes

    def update(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            if not self._left:
                self._end_part()
            self._part.update(view[: self._left])
            view, self._left = view[self._left :], self._left - min(self._left, len(view))

    def hexdigest(self) -> str:
        if self._left < self._part_bytes:
            self._end_part()
        return str(self._whole.hexdigest())

    def _end_part(self) -> None:
        self._whole.update(self._part.digest())
        self._part, self._left = self._new(), self._part_bytes


@cache
def algorithms() -> dict[str, Callable[[], Any]]:
    """The algorithms that can be computed here, the strongest first."""
    known: dict[str, Callable[[], Any]] = {
        "sha256": hashlib.sha256,
        "md5": lambda: hashlib.md5(usedforsecurity=False),
        "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    }
    # Both libraries also have slow versions in plain Python, at a few megabytes a second.
    with suppress(ImportError):
        from awscrt import checksums  # type: ignore[import-not-found,import-untyped,unused-ignore]

        known["crc64nvme"] = lambda: _Crc(lambda data, value: int(checksums.crc64nvme(bytes(data), value)), 8)
    with suppress(ImportError):
        import google_crc32c

        if google_crc32c.implementation == "c":
            known["crc32c"] = lambda: _Crc(lambda data, value: int(google_crc32c.extend(value, bytes(data))), 4)
    known["crc32"] = lambda: _Crc(zlib.crc32, 4)
    return known


def digest_of(vouched: Vouched) -> Digest:
    """A new digest that is computed as the store computed its own."""
    if vouched.part_bytes:
        return _Composite(vouched.algorithm, vouched.part_bytes)
    digest: Digest = algorithms()[vouched.algorithm]()
    return digest


def check(vouched: Vouched, found: Digest, where: str) -> None:
    """Compare what was read of `where` with what its store says.

    Raises:
        DamagedSource: they differ; the message names both.
    """
    if found.hexdigest() != vouched.value:
        read = Vouched(vouched.algorithm, found.hexdigest())
        raise DamagedSource(f"{where}: damaged on the way or in the store: read {read}, the store has {vouched}")


class InOrder:
    """A digest of parts that several threads read: each waits until the parts before its own were added.

    The parts must be begun in order, each by a thread that has it alone, or the wait has no end.
    """

    def __init__(self, vouched: Vouched) -> None:
        self.vouched = vouched
        self.digest = digest_of(vouched)
        self._next = 0
        self._ended = False
        self._changed = threading.Condition()

    def add(self, number: int, body: bytearray) -> None:
        """Add part `number`, counted from 0.

        Raises:
            CopyFailed: another part has failed, so that this one's turn never comes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._next == number)
            if self._ended:
                raise CopyFailed(f"part {number + 1}: given up, another part failed")
        self.digest.update(body)
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Release the threads that wait: a part has failed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
