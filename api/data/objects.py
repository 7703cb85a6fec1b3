"""What a region's bucket holds of a table."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

from sqlalchemy.orm import Session

from api.fleet.storage import STORAGE_ERRORS, storage_unavailable
from api.problems import Kind, Problem, invalid
from api.state import State
from domain.ids import PARTITION_RULE, is_partition_name, partition_prefix, table_prefix
from infra.db import integrity, outbox
from infra.db.models import Region
from mizzen.objects import checksums
from mizzen.objects.manifest import Manifest, checksummed, is_complete, manifest_of, pack, size_bytes
from mizzen.objects.store import MissingObject, ObjectInfo

WHOLE = "all"
"""The one partition of a table that has objects outside folders."""
MAX_PARTITIONS = 100_000


@dataclass(frozen=True, slots=True)
class Found:
    """A partition as the bucket holds it."""

    name: str
    location: str
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        """Of all its objects."""
        return size_bytes(self.manifest)


def partitions_of(state: State, region: Region, table: str) -> list[Found]:
    """The partitions that the objects under the table's folder are: its folders, or one.

    Raises:
        Problem: there is no object, too many folders or one with no partition's name, or the bucket cannot be read.
    """
    prefix = table_prefix(table)
    folders: dict[str, list[ObjectInfo]] = defaultdict(list)
    for info in _objects(state, region, prefix):
        folder, slash, _ = info.key.removeprefix(prefix).partition("/")
        folders[folder if slash else ""].append(info)
        if len(folders) > MAX_PARTITIONS:
            raise invalid("name", f"there are over {MAX_PARTITIONS} folders under {prefix}; put more into each")
    if not folders:
        raise invalid("name", f"the bucket of region {region.name} has no objects under {prefix}; put them there first")
    if "" in folders:
        return [Found(WHOLE, prefix, manifest_of(prefix, chain.from_iterable(folders.values())))]
    for folder in folders:
        if not is_partition_name(folder):
            raise invalid("name", f"the folder {prefix}{folder}/ is no partition: its name must be {PARTITION_RULE}")
    return [
        Found(name, location, manifest_of(location, infos))
        for name, infos in sorted(folders.items())
        for location in (partition_prefix(table, name),)
    ]


def partition_at(state: State, region: Region, table: str, name: str) -> Found | None:
    """A partition by the objects in its folder; None where there is none.

    Raises:
        Problem: the bucket cannot be read.
    """
    location = partition_prefix(table, name)
    found = manifest_of(location, _objects(state, region, location))
    return Found(name, location, found) if found else None


def with_checksums(state: State, region: Region, found: Found, *, declared: bool) -> Found:
    """The partition with the checksums of its objects, read now; SHA-256 where its owner has declared one.

    Raises:
        Problem: the bucket cannot be read, or an object is gone.
    """
    algorithm = "sha256" if declared else checksums.fastest()
    try:
        read = checksummed(state.store(region.bucket_url), found.location, found.manifest, algorithm)
    except STORAGE_ERRORS as error:
        raise storage_unavailable(error) from None
    except MissingObject as error:
        raise Problem(Kind.CONFLICT, f"the objects changed while they were read: {error}") from None
    return replace(found, manifest=read)


def keep_manifests(session: Session, table: str, region: str, found: Iterable[Found], read_at: datetime) -> None:
    """Writes down what new partitions are made of, read at home after `read_at`; the rest is read in the background."""
    known = (
        integrity.NewManifest(f.name, pack(f.manifest), len(f.manifest), is_complete(f.manifest)) for f in found
    )  # fmt: skip
    integrity.add_manifests(session, table, region, known, read_at)
    outbox.scrub(session, region)


def _objects(state: State, region: Region, prefix: str) -> Iterable[ObjectInfo]:
    try:
        yield from state.store(region.bucket_url).list(prefix)
    except STORAGE_ERRORS as error:
        raise storage_unavailable(error) from None
