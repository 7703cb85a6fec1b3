"""Compares the bytes read from an object with the digest that its store publishes.

S3 and Google Cloud Storage keep a digest of each object: an MD5, CRC or SHA of the whole content, or a composite, which
is the digest of the digests of its parts. The comparison detects bytes that changed between the store and this process.
"""

import hashlib
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

from infra.copies.errors import CopyFailed, DamagedSource


class StoreDigest(NamedTuple):
    """The digest of an object's content that its store publishes."""

    algorithm: str
    """A key of `algorithms()`."""
    value: str
    """The digest, in hexadecimal."""
    part_bytes: int = 0
    """For a composite digest, the size of every part except the last; 0 if the digest is of the content itself."""

    def __str__(self) -> str:
        """Return the algorithm and the digest."""
        return f"{self.algorithm}:{self.value}"


class Digest(Protocol):
    """A digest object, as in `hashlib`."""

    def update(self, data: Any, /) -> None:
        """Add the next bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes added so far."""


class _Crc:
    """A CRC of `size` bytes, computed by a function of the next data and the previous value."""

    def __init__(self, function: Callable[[Any, int], int], size: int) -> None:
        self._function, self._size, self._value = function, size, 0

    def update(self, data: Any) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")

    def hexdigest(self) -> str:
        return self.digest().hex()


class _Composite:
    """A composite digest: the digest of the digests of parts of equal size."""

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
    """Return the algorithms that this process can compute, the strongest first."""
    known: dict[str, Callable[[], Any]] = {
        "sha256": hashlib.sha256,
        "md5": lambda: hashlib.md5(usedforsecurity=False),
        "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    }
    # Only the C versions of both libraries are used: those in plain Python process a few megabytes per second.
    with suppress(ImportError):
        from awscrt import checksums  # type: ignore[import-not-found,import-untyped,unused-ignore]

        known["crc64nvme"] = lambda: _Crc(lambda data, value: int(checksums.crc64nvme(bytes(data), value)), 8)
    with suppress(ImportError):
        import google_crc32c

        if google_crc32c.implementation == "c":
            known["crc32c"] = lambda: _Crc(lambda data, value: int(google_crc32c.extend(value, bytes(data))), 4)
    known["crc32"] = lambda: _Crc(zlib.crc32, 4)
    return known


def digest_of(store_digest: StoreDigest) -> Digest:
    """Return a new digest object that is computed in the same way as the store's digest."""
    if store_digest.part_bytes:
        return _Composite(store_digest.algorithm, store_digest.part_bytes)
    digest: Digest = algorithms()[store_digest.algorithm]()
    return digest


def check(store_digest: StoreDigest, found: Digest, where: str) -> None:
    """Compare the digest of the bytes read from the object `where` with the store's digest.

    Raises:
        DamagedSource: they differ. The message gives both.
    """
    if found.hexdigest() != store_digest.value:
        read = StoreDigest(store_digest.algorithm, found.hexdigest())
        raise DamagedSource(f"{where}: damaged in transit or in the store: read {read}, the store has {store_digest}")


class InOrder:
    """A digest of parts that several threads read: each thread waits until the parts before its own are added.

    Threads must start the parts in order, each part in one thread; otherwise the threads deadlock.
    """

    def __init__(self, store_digest: StoreDigest) -> None:
        self.store_digest = store_digest
        self.digest = digest_of(store_digest)
        self._next = 0
        self._ended = False
        self._changed = threading.Condition()

    def add(self, number: int, body: bytearray) -> None:
        """Add part `number`, counted from 0.

        Raises:
            CopyFailed: another part has failed, so this part is not added.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._next == number)
            if self._ended:
                raise CopyFailed(f"part {number + 1}: cancelled, because another part failed")
        self.digest.update(body)
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Wake all waiting threads because a part has failed; their `add` raises."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
