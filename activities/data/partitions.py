"""One partition's bytes: copied from a region to another, and held against what the catalogue says of them."""

from dataclasses import dataclass

from infra.db.tables import Partition
from mizzen.objects.bandwidth import Share
from mizzen.objects.copying import Progress, Wanted, copy_objects
from mizzen.objects.manifest import Manifest
from mizzen.objects.store import ObjectStore


class WrongPartition(Exception):
    """The objects of a partition are not what the catalogue says; the message names both, and where."""


@dataclass(frozen=True)
class Bucket:
    """A region's bucket."""

    region: str
    store: ObjectStore


def bring(
    source: Bucket,
    target: Bucket,
    partition: Partition,
    manifest: Manifest,
    *,
    new: bool,
    share: Share | None,
    progress: Progress,
) -> None:
    """Copies the objects of a partition's manifest. What is read of each is compared with its checksum in the manifest.

    Nothing is read back at the target: its store confirms each part that it keeps. An object that is there already and
    has its checksum is not copied again. A `new` copy is alone in its folder. `progress` is
    told bytes done and in total, and may end the copy by raising.

    Raises:
        WrongPartition: the target of a new copy has other objects in the partition's folder.
        CopyFailed, MissingObject, CopyInUse: see `copy_objects`. A source that is not what the manifest says is one.
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
        message = f"{sum(there.values())} bytes in {target.region}, it has {partition.size_bytes}"
        raise WrongPartition(
            f"table {partition.data_table}, partition {partition.name}: {message}; {key} has {there.get(key)}, in"
            f" {source.region} {wanted.get(key)}"
        )
