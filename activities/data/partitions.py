"""Copies one partition from a region to another, and compares its objects with the catalogue."""

from dataclasses import dataclass

from infra.copies.bandwidth import BandwidthShare
from infra.copies.copy import Progress, Wanted, copy_objects
from infra.copies.manifest import FolderManifest
from infra.copies.uploads import CopyStore
from infra.db.tables import Partition


class WrongPartition(Exception):
    """The objects of a partition differ from the catalogue. The message names both values and the region."""


@dataclass(frozen=True)
class Bucket:
    """A region's bucket."""

    region: str
    store: CopyStore


def bring(
    source: Bucket,
    target: Bucket,
    partition: Partition,
    manifest: FolderManifest,
    *,
    new: bool,
    share: BandwidthShare | None,
    progress: Progress,
) -> None:
    """Copies the objects of a partition's manifest, and compares the content of each with the manifest's checksum.

    Nothing is read back at the target: its store confirms each part. An object that already exists at the target with
    the right checksum is not copied again. The folder of a `new` copy must contain no other objects. `progress` is
    called with the copied and total bytes, and may end the copy by raising.

    Raises:
        WrongPartition: the target of a new copy has other objects in the partition's folder.
        CopyFailed, MissingObject, CopyInUse: see `copy_objects`. A source that differs from the manifest is reported
            in this way, too.
    """
    location = partition.location
    objects = [Wanted(location + entry.path, entry.size_bytes, entry.checksum) for entry in manifest]
    copy_objects(
        source.store, target.store, objects, name=f"table {partition.data_table}", share=share, progress=progress
    )
    if not new:
        return
    there = {info.key: info.size_bytes for info in target.store.list(location)}
    wanted = {o.key: o.size_bytes for o in objects}
    if there != wanted:
        key = min(there.items() ^ wanted.items())[0]
        message = f"{sum(there.values())} bytes in {target.region}, should be {partition.size_bytes}"
        raise WrongPartition(
            f"table {partition.data_table}, partition {partition.name}: {message}; size of {key}: {there.get(key)}, in"
            f" {source.region} {wanted.get(key)}"
        )
