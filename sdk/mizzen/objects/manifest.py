"""What a folder of objects should hold: names, sizes and checksums, packed small, and compared with what a store holds.

A manifest of a million objects is one value, not a million rows: some 40 MB packed.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeAlias

from mizzen.objects import checksums
from mizzen.objects.bandwidth import Share
from mizzen.objects.store import MissingObject, ObjectInfo, ObjectStore
from mizzen.objects.workers import Workers

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r"})
"""As `sha256sum` writes them in paths."""
_ESCAPED = "\\"
"""Begins a line whose path has such."""
_PIECE_BYTES = 8 << 20
_AT_ONCE = 8
"""Objects that are read at the same time."""
_BATCH = 64
_BATCH_BYTES = 256 << 20
"""Objects are read in batches of at most so many objects, and about so many bytes."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One object of the folder."""

    path: str
    """Its key below the folder."""
    size_bytes: int
    checksum: str | None = None
    """`algorithm:hex` of its content; None: it has not been read yet."""


Manifest: TypeAlias = tuple[ManifestEntry, ...]
"""The objects of a folder, sorted by path (its bytes in UTF-8)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first object that is not what the manifest says."""

    key: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.key} is {self.found}, expected {self.expected}"


def listed(store: ObjectStore, folder: str) -> Manifest:
    """The objects below `folder` (a prefix that ends in `/`): names and sizes, without checksums."""
    return manifest_of(folder, store.list(folder))


def manifest_of(folder: str, listing: Iterable[ObjectInfo]) -> Manifest:
    """The objects of a listing of `folder`: names and sizes, without checksums."""
    found = [ManifestEntry(info.key.removeprefix(folder), info.size_bytes) for info in listing]
    return tuple(sorted(found, key=lambda entry: entry.path.encode(errors="surrogateescape")))


def size_bytes(manifest: Manifest) -> int:
    """Bytes of all its objects."""
    return sum(entry.size_bytes for entry in manifest)


def is_complete(manifest: Manifest) -> bool:
    """Whether every object has a checksum."""
    return all(entry.checksum is not None for entry in manifest)


def pack(manifest: Manifest) -> bytes:
    """The manifest as compressed lines of JSON; `unpack` reads it."""
    lines = (json.dumps([e.path, e.size_bytes, e.checksum], separators=(",", ":")) for e in manifest)
    return zlib.compress("\n".join(lines).encode(), level=1)


def unpack(packed: bytes) -> Manifest:
    """The manifest that `pack` wrote.

    Raises:
        ValueError, zlib.error: the bytes are not a packed manifest.
    """
    lines = zlib.decompress(packed).decode().split("\n")
    return tuple(ManifestEntry(*json.loads(line)) for line in lines if line)


def declared_checksum(manifest: Manifest) -> str:
    """`sha256:` of the lines that `sha256sum` prints for the objects of a manifest, by path.

    Raises:
        ValueError: an object has no checksum, or not a SHA-256.
    """
    lines = sha256()
    for entry in manifest:
        algorithm, _, digest = (entry.checksum or "").partition(":")
        if algorithm != "sha256":
            raise ValueError(f"{entry.path}: its checksum is {entry.checksum}, not a SHA-256")
        escaped = entry.path.translate(_ESCAPES)
        lines.update(f"{'' if escaped == entry.path else _ESCAPED}{digest}  {escaped}\n".encode())
    return f"sha256:{lines.hexdigest()}"


def listing_difference(store: ObjectStore, folder: str, manifest: Manifest) -> Difference | None:
    """The first object that is missing below `folder` or has another size; None: there is none.

    Objects that the manifest does not name are ignored.
    """
    left = {folder + entry.path: entry.size_bytes for entry in manifest}
    for info in store.list(folder):
        expected = left.pop(info.key, None)
        if expected is not None and expected != info.size_bytes:
            return Difference(info.key, f"{expected} bytes", f"{info.size_bytes} bytes")
    if left:
        key = min(left)
        return Difference(key, f"{left[key]} bytes", "missing")
    return None


def content_difference(
    store: ObjectStore,
    folder: str,
    manifest: Manifest,
    *,
    after: str = "",
    share: Share | None = None,
    at_batch: Callable[[str], None] = lambda path: None,
) -> Difference | None:
    """The first object whose content, read in full, does not have its checksum; None: there is none.

    Entries without a checksum are skipped, as are those up to the path `after`. `at_batch` is told the last path of
    each batch that was right, and may end the reading by raising.
    """
    start = after.encode(errors="surrogateescape")
    todo = [e for e in manifest if e.checksum is not None and e.path.encode(errors="surrogateescape") > start]
    with Workers(_AT_ONCE) as workers:
        for batch in _batches(todo):
            algorithms = [str(entry.checksum).partition(":")[0] for entry in batch]
            reads = [
                workers.submit(object_checksum, store, folder + e.path, a, share)
                for e, a in zip(batch, algorithms, strict=True)
            ]
            for entry, read in zip(batch, reads, strict=True):
                try:
                    found = read.result()
                except MissingObject:
                    found = "missing"
                if found != entry.checksum:
                    return Difference(folder + entry.path, str(entry.checksum), found)
            at_batch(batch[-1].path)
    return None


def checksummed(
    store: ObjectStore,
    folder: str,
    manifest: Manifest,
    algorithm: str,
    *,
    share: Share | None = None,
    at_batch: Callable[[Manifest], None] = lambda manifest: None,
) -> Manifest:
    """The manifest with the checksum of every object; those that have one are not read again.

    `at_batch` is given the manifest so far after each batch, and may end the reading by raising.

    Raises:
        MissingObject: an object is missing.
    """
    entries = list(manifest)
    place = {entry.path: index for index, entry in enumerate(entries)}
    with Workers(_AT_ONCE) as workers:
        for batch in _batches([entry for entry in entries if entry.checksum is None]):
            reads = [workers.submit(object_checksum, store, folder + e.path, algorithm, share) for e in batch]
            for entry, read in zip(batch, reads, strict=True):
                entries[place[entry.path]] = replace(entry, checksum=read.result())
            at_batch(tuple(entries))
    return tuple(entries)


def object_checksum(store: ObjectStore, key: str, algorithm: str, share: Share | None = None) -> str:
    """`algorithm:hex` of an object's content, read piece by piece, each drawn from `share`.

    Raises:
        MissingObject: there is no such object.
        UnknownAlgorithm, MissingAlgorithm: see `checksums.digest`.
    """
    digest = checksums.digest(algorithm)
    known = store.size(key)
    if known is None:
        raise MissingObject(f"no object {key!r} at {store.uri('')}")
    body = memoryview(bytearray(max(1, min(_PIECE_BYTES, known))))
    at = 0
    with store.opened(key) as fetch:
        while True:
            if share is not None and known:
                share.draw(len(body))
            count = fetch(body, at)
            digest.update(body[:count])
            at += count
            if count < len(body) or at >= known:
                return f"{algorithm}:{digest.hexdigest()}"


def _batches(entries: Sequence[ManifestEntry]) -> Iterator[list[ManifestEntry]]:
    batch: list[ManifestEntry] = []
    batch_bytes = 0
    for entry in entries:
        batch.append(entry)
        batch_bytes += entry.size_bytes
        if len(batch) == _BATCH or batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch
