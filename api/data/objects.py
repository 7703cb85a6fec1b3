"""Finds the objects of tables and partitions in a region's bucket."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

from sqlalchemy.orm import Session

from api.fleet.storage import STORAGE_ERRORS, storage_unavailable
from api.problems import HttpProblem, ProblemType, invalid
from api.state import ApiState
from domain.ids import PARTITION_RULE, is_partition_name, partition_prefix, table_prefix
from infra.copies.manifest import FolderManifest, checksummed, is_complete, manifest_of, pack, size_bytes
from infra.db import integrity, outbox
from infra.db.models import Region
from mizzen.objects import checksums
from mizzen.objects.store import MissingObject, ObjectInfo

WHOLE = "all"
"""Name of the single partition of a table whose objects are not in folders."""
MAX_PARTITIONS = 100_000


@dataclass(frozen=True, slots=True)
class FoundPartition:
    """A partition that was found in the bucket, with a manifest of its objects."""

    name: str
    location: str
    manifest: FolderManifest

    @property
    def size_bytes(self) -> int:
        """Total size of the partition's objects."""
        return size_bytes(self.manifest)


def partitions_of(state: ApiState, region: Region, table: str) -> list[FoundPartition]:
    """Returns the partitions of a table in the bucket: one per folder, or a single one if objects are not in folders.

    Raises:
        Problem: there are no objects or too many folders, a folder's name is invalid, or the bucket cannot be read.
    """
    prefix = table_prefix(table)
    folders: dict[str, list[ObjectInfo]] = defaultdict(list)
    for info in _objects(state, region, prefix):
        folder, slash, _ = info.key.removeprefix(prefix).partition("/")
        folders[folder if slash else ""].append(info)
        if len(folders) > MAX_PARTITIONS:
            raise invalid("name", f"there are more than {MAX_PARTITIONS} folders under {prefix}; use fewer partitions")
    if not folders:
        raise invalid("name", f"the bucket of region {region.name} has no objects under {prefix}; put them there first")
    if "" in folders:
        return [FoundPartition(WHOLE, prefix, manifest_of(prefix, chain.from_iterable(folders.values())))]
    for folder in folders:
        if not is_partition_name(folder):
            raise invalid("name", f"{prefix}{folder}/ is not a valid partition: its name must be {PARTITION_RULE}")
    return [
        FoundPartition(name, location, manifest_of(location, infos))
        for name, infos in sorted(folders.items())
        for location in (partition_prefix(table, name),)
    ]


def partition_at(state: ApiState, region: Region, table: str, name: str) -> FoundPartition | None:
    """Returns the partition in its folder of the bucket; None: the folder has no objects.

    Raises:
        Problem: the bucket cannot be read.
    """
    location = partition_prefix(table, name)
    found = manifest_of(location, _objects(state, region, location))
    return FoundPartition(name, location, found) if found else None


def with_checksums(state: ApiState, region: Region, found: FoundPartition, *, declared: bool) -> FoundPartition:
    """Reads the objects of a partition and returns it with their checksums; SHA-256 if its owner declared one.

    Raises:
        Problem: the bucket cannot be read, or an object was deleted.
    """
    algorithm = "sha256" if declared else checksums.fastest()
    try:
        read = checksummed(state.store(region.bucket_url), found.location, found.manifest, algorithm)
    except STORAGE_ERRORS as error:
        raise storage_unavailable(error) from None
    except MissingObject as error:
        raise HttpProblem(ProblemType.CONFLICT, f"the objects changed while they were read: {error}") from None
    return replace(found, manifest=read)


def keep_manifests(
    session: Session, table: str, region: str, found: Iterable[FoundPartition], read_at: datetime
) -> None:
    """Stores the manifests of new partitions, read at the table's home after `read_at`.

    Missing checksums are computed in the background.
    """
    known = (
        integrity.NewManifest(f.name, pack(f.manifest), len(f.manifest), is_complete(f.manifest)) for f in found
    )  # fmt: skip
    integrity.add_manifests(session, table, region, known, read_at)
    outbox.scrub(session, region)


def _objects(state: ApiState, region: Region, prefix: str) -> Iterable[ObjectInfo]:
    try:
        yield from state.store(region.bucket_url).list(prefix)
    except STORAGE_ERRORS as error:
        raise storage_unavailable(error) from None
