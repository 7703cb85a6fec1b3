"""Copying objects from one store to another: verified, and taken up again where it stopped."""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mizzen.objects.store import ObjectInfo, ObjectStore

CHUNK_BYTES = 8 << 20


class CopyFailed(Exception):
    """An object is not the same in the target after it was copied."""


def sha256_of(store: ObjectStore, key: str) -> str:
    """SHA-256 (hex) of an object's content, read in chunks.

    Raises:
        MissingObject: there is none.
    """
    digest = hashlib.sha256()
    start = 0
    while chunk := store.get_range(key, start, start + CHUNK_BYTES):
        digest.update(chunk)
        start += len(chunk)
    return digest.hexdigest()


def copy_prefix(
    source: ObjectStore, target: ObjectStore, prefix: str, *, progress: Callable[[int, int], None] | None = None
) -> int:
    """Copy all objects under `prefix`: see `copy_objects`."""
    return copy_objects(source, target, list(source.list(prefix)), progress=progress)


def copy_objects(
    source: ObjectStore,
    target: ObjectStore,
    objects: Sequence[ObjectInfo],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Copy these objects, one by one; returns their bytes, those included that were there already.

    An object that the target has with the same size and content is not copied again, so a copy that was interrupted
    goes on where it stopped. `progress` is called with (bytes done, bytes in total) after each object.

    Raises:
        CopyFailed: an object's size or content differs in the target after copying.
        MissingObject: an object vanished from the source.
    """
    total_bytes = sum(info.size_bytes for info in objects)
    done_bytes = 0
    for info in objects:
        _copy_object(source, target, info)
        done_bytes += info.size_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    return done_bytes


def _copy_object(source: ObjectStore, target: ObjectStore, info: ObjectInfo) -> None:
    if target.size(info.key) == info.size_bytes and sha256_of(target, info.key) == sha256_of(source, info.key):
        return
    digest = hashlib.sha256()
    size_bytes = 0
    with tempfile.TemporaryDirectory(prefix="mizzen-copy-") as folder:
        path = Path(folder) / "object"
        with path.open("wb") as file:
            while chunk := source.get_range(info.key, size_bytes, size_bytes + CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
        if size_bytes != info.size_bytes:
            raise CopyFailed(f"{info.key}: changed in the source: {size_bytes} bytes, listed with {info.size_bytes}")
        target.put(info.key, path)
    copied = sha256_of(target, info.key)
    if target.size(info.key) != size_bytes or copied != digest.hexdigest():
        raise CopyFailed(f"{info.key}: SHA-256 {copied} in {target.uri(info.key)}, {digest.hexdigest()} in the source")
