"""Manifests of folders of objects (names, sizes, checksums): packing, and comparison with a store.

The manifest of a million objects is one packed value of about 40 MB, not a million rows.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeAlias

from infra.copies.bandwidth import BandwidthShare
from mizzen.objects import checksums
from mizzen.objects.buffers import aligned
from mizzen.objects.store import MissingObject, ObjectInfo, ObjectStore
from mizzen.objects.workers import Workers

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r"})
"""Escapes of `sha256sum` in paths."""
_ESCAPED = "\\"
"""Prefix of a line whose path contains escapes."""
_PIECE_BYTES = 8 << 20
_AT_ONCE = 8
"""Objects that are read concurrently."""
_BATCH = 64
_BATCH_BYTES = 256 << 20
"""Objects are read in batches of at most `_BATCH` objects and about `_BATCH_BYTES` bytes."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """Path, size and checksum of one object of a folder."""

    path: str
    """Key of the object, relative to the folder."""
    size_bytes: int
    checksum: str | None = None
    """`algorithm:hex` of the content; None if it has not been computed yet."""


FolderManifest: TypeAlias = tuple[ManifestEntry, ...]
"""The objects of a folder, sorted by the UTF-8 bytes of their paths."""


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """The first object that differs from the manifest."""

    key: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.key} is {self.found}, expected {self.expected}"


def listed(store: ObjectStore, folder: str) -> FolderManifest:
    """List the objects below `folder` (a prefix that ends in `/`) as a manifest without checksums."""
    return manifest_of(folder, store.list(folder))


def manifest_of(folder: str, listing: Iterable[ObjectInfo]) -> FolderManifest:
    """Convert a listing of `folder` to a manifest without checksums."""
    found = [ManifestEntry(info.key.removeprefix(folder), info.size_bytes) for info in listing]
    return tuple(sorted(found, key=lambda entry: entry.path.encode(errors="surrogateescape")))


def size_bytes(manifest: FolderManifest) -> int:
    """Return the total size of all objects of a manifest, in bytes."""
    return sum(entry.size_bytes for entry in manifest)


def is_complete(manifest: FolderManifest) -> bool:
    """Return whether every object of a manifest has a checksum."""
    return all(entry.checksum is not None for entry in manifest)


def pack(manifest: FolderManifest) -> bytes:
    """Encode a manifest as compressed lines of JSON, for `unpack`."""
    lines = (json.dumps([e.path, e.size_bytes, e.checksum], separators=(",", ":")) for e in manifest)
    return zlib.compress("\n".join(lines).encode(), level=1)


def unpack(packed: bytes) -> FolderManifest:
    """Decode a manifest that `pack` encoded.

    Raises:
        ValueError, zlib.error: the bytes are not a packed manifest.
    """
    lines = zlib.decompress(packed).decode().split("\n")
    return tuple(ManifestEntry(*json.loads(line)) for line in lines if line)


def declared_checksum(manifest: FolderManifest) -> str:
    """Return the SHA-256 (`sha256:hex`) of the lines that `sha256sum` prints for the objects, sorted by path.

    Raises:
        ValueError: an object has no checksum, or its checksum is not a SHA-256.
    """
    lines = sha256()
    for entry in manifest:
        algorithm, _, digest = (entry.checksum or "").partition(":")
        if algorithm != "sha256":
            raise ValueError(f"{entry.path}: its checksum is {entry.checksum}, not a SHA-256")
        escaped = entry.path.translate(_ESCAPES)
        lines.update(f"{'' if escaped == entry.path else _ESCAPED}{digest}  {escaped}\n".encode())
    return f"sha256:{lines.hexdigest()}"


def listing_difference(store: ObjectStore, folder: str, manifest: FolderManifest) -> ObjectDifference | None:
    """Return the first object that is missing below `folder` or has another size; None if there is no difference.

    Objects that the manifest does not name are ignored.
    """
    left = {folder + entry.path: entry.size_bytes for entry in manifest}
    for info in store.list(folder):
        expected = left.pop(info.key, None)
        if expected is not None and expected != info.size_bytes:
            return ObjectDifference(info.key, f"{expected} bytes", f"{info.size_bytes} bytes")
    if left:
        key = min(left)
        return ObjectDifference(key, f"{left[key]} bytes", "missing")
    return None


def content_difference(
    store: ObjectStore,
    folder: str,
    manifest: FolderManifest,
    *,
    after: str = "",
    share: BandwidthShare | None = None,
    at_batch: Callable[[str], None] = lambda path: None,
) -> ObjectDifference | None:
    """Read all objects, and return the first that does not match its checksum; None if there is no difference.

    Entries without a checksum are skipped, and so are entries up to the path `after`. `at_batch` is called with the
    last path of each batch that matched; an exception from it ends the reading.
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
                    return ObjectDifference(folder + entry.path, str(entry.checksum), found)
            at_batch(batch[-1].path)
    return None


def checksummed(
    store: ObjectStore,
    folder: str,
    manifest: FolderManifest,
    algorithm: str,
    *,
    share: BandwidthShare | None = None,
    at_batch: Callable[[FolderManifest], None] = lambda manifest: None,
) -> FolderManifest:
    """Compute the missing checksums, and return the complete manifest. Objects with a checksum are not read again.

    `at_batch` is called with the manifest so far after each batch; an exception from it ends the reading.

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


def object_checksum(store: ObjectStore, key: str, algorithm: str, share: BandwidthShare | None = None) -> str:
    """Read an object in pieces, and return the checksum `algorithm:hex`. Every byte counts against `share`.

    Raises:
        MissingObject: there is no such object.
        UnknownAlgorithm, MissingAlgorithm: see `checksums.digest`.
    """
    digest = checksums.digest(algorithm)
    known = store.size(key)
    if known is None:
        raise MissingObject(f"no object {key!r} at {store.uri('')}")
    body = aligned(max(1, min(_PIECE_BYTES, known)))
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
