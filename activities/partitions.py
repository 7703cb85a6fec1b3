"""One partition's bytes: copied from a region to another, and held against what the catalogue says of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256

from infra.db.models import Partition
from mizzen.objects import checksums
from mizzen.objects.bandwidth import Share
from mizzen.objects.copying import PART_BYTES, Progress, Wanted, copy_objects
from mizzen.objects.store import ObjectStore

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r"})
"""As `sha256sum` writes them in paths."""
_ESCAPED = "\\"
"""Begins a line whose path has such."""


class WrongPartition(Exception):
    """The objects of a partition are not what the catalogue says; the message names both, and where."""


@dataclass(frozen=True)
class Bucket:
    """A region's bucket."""

    region: str
    store: ObjectStore


def bring(source: Bucket, target: Bucket, partition: Partition, *, share: Share | None, progress: Progress) -> None:
    """Copies a partition's objects and verifies them: their bytes, and its checksum where one was declared.

    What is there already is not copied again. Objects that do not have the checksum are removed, so that the next try
    copies them anew. `progress` is told bytes done and in total, and may end the copy by raising.

    Raises:
        WrongPartition: the source's objects have another size, the target has others, or they have another checksum.
        CopyFailed, MissingObject, CopyInUse: see `copy_objects`.
    """
    table, location = partition.data_table, partition.location
    what = f"table {table}, partition {partition.name}"
    objects = [Wanted(info.key, info.size_bytes) for info in source.store.list(location)]
    found_bytes = sum(wanted.size_bytes for wanted in objects)
    if found_bytes != partition.size_bytes:
        raise WrongPartition(f"{what}: {found_bytes} bytes in {source.region}, it has {partition.size_bytes}")
    copy_objects(source.store, target.store, objects, name=f"table {table}", share=share, progress=progress)
    there = {info.key: info.size_bytes for info in target.store.list(location)}
    wanted = {o.key: o.size_bytes for o in objects}
    if there != wanted:
        key = min(there.items() ^ wanted.items())[0]
        message = f"{sum(there.values())} bytes in {target.region}, it has {partition.size_bytes}"
        raise WrongPartition(f"{what}: {message}; {key} has {there.get(key)}, in {source.region} {wanted.get(key)}")
    if partition.checksum is None:
        return
    size_bytes = partition.size_bytes
    found = checksum(target.store, location, wanted.items(), lambda: progress(size_bytes, size_bytes))
    if found != partition.checksum:
        for key in wanted:
            target.store.delete(key)
        raise WrongPartition(f"{what}: {found} in {target.region}, it has {partition.checksum}")


def checksum(
    store: ObjectStore, location: str, objects: Iterable[tuple[str, int]], at_each_piece: Callable[[], None]
) -> str:
    """`sha256:` of the lines that `sha256sum` prints for the objects (key, bytes) of a folder, by path.

    All of them are read, piece by piece.
    """
    lines = sha256()
    sized = sorted(objects, key=lambda entry: entry[0].encode())
    body = memoryview(bytearray(min(PART_BYTES, max((size_bytes for _, size_bytes in sized), default=0))))
    for key, size_bytes in sized:
        digest, at = checksums.digest("sha256"), 0
        with store.opened(key) as fetch:
            while at < size_bytes and (count := fetch(body[: size_bytes - at], at)):
                digest.update(body[:count])
                at += count
                at_each_piece()
        path = key.removeprefix(location)
        escaped = path.translate(_ESCAPES)
        lines.update(f"{'' if escaped == path else _ESCAPED}{digest.hexdigest()}  {escaped}\n".encode())
    return f"sha256:{lines.hexdigest()}"
