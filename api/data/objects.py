"""What a region's bucket holds of a table."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from api.fleet.storage import STORAGE_ERRORS, storage_unavailable
from api.problems import invalid
from api.state import State
from domain.ids import PARTITION_RULE, is_partition_name, partition_prefix, table_prefix
from infra.db.models import Region
from mizzen.objects.store import ObjectInfo

WHOLE = "all"
"""The one partition of a table that has objects outside folders."""
MAX_PARTITIONS = 100_000


@dataclass(frozen=True, slots=True)
class Found:
    """A partition as the bucket holds it."""

    name: str
    location: str
    size_bytes: int


def partitions_of(state: State, region: Region, table: str) -> list[Found]:
    """The partitions that the objects under the table's folder are: its folders, or one.

    Raises:
        Problem: there is no object, too many folders or one with no partition's name, or the bucket cannot be read.
    """
    prefix = table_prefix(table)
    sizes: dict[str, int] = defaultdict(int)
    for info in _objects(state, region, prefix):
        folder, slash, _ = info.key.removeprefix(prefix).partition("/")
        sizes[folder if slash else ""] += info.size_bytes
        if len(sizes) > MAX_PARTITIONS:
            raise invalid("name", f"there are over {MAX_PARTITIONS} folders under {prefix}; put more into each")
    if not sizes:
        raise invalid("name", f"the bucket of region {region.name} has no objects under {prefix}; put them there first")
    if "" in sizes:
        return [Found(WHOLE, prefix, sum(sizes.values()))]
    for folder in sizes:
        if not is_partition_name(folder):
            raise invalid("name", f"the folder {prefix}{folder}/ is no partition: its name must be {PARTITION_RULE}")
    return [Found(name, partition_prefix(table, name), size) for name, size in sorted(sizes.items())]


def size_of(state: State, region: Region, location: str) -> int | None:
    """Bytes of the objects in a folder; None where there is none.

    Raises:
        Problem: the bucket cannot be read.
    """
    sizes = [info.size_bytes for info in _objects(state, region, location)]
    return sum(sizes) if sizes else None


def _objects(state: State, region: Region, prefix: str) -> Iterable[ObjectInfo]:
    try:
        yield from state.store(region.bucket_url).list(prefix)
    except STORAGE_ERRORS as error:
        raise storage_unavailable(error) from None
