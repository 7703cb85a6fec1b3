"""Which prefixes of which buckets a task may use: its checkpoints to write, and the tables of its document to read."""

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from domain.launch import LaunchDescription


@dataclass(frozen=True, order=True)
class Prefix:
    """The objects of a bucket whose names start with `prefix`, which ends with a slash."""

    bucket: str
    prefix: str


@dataclass(frozen=True)
class BucketScope:
    """The prefixes that the tasks of an attempt may use in the buckets of one kind of store."""

    writes: tuple[Prefix, ...]
    """Prefixes in which they may read, list, write and delete."""
    reads: tuple[Prefix, ...]

    def __bool__(self) -> bool:
        """Whether the attempt uses a bucket of this kind."""
        return bool(self.writes or self.reads)


def bucket_scope(launch: LaunchDescription, scheme: str) -> BucketScope:
    """Returns what the tasks of an attempt need in buckets whose URLs have this scheme (`s3` or `gs`)."""
    return BucketScope(_prefixes([launch.checkpoint.uri], scheme), _prefixes(launch.tables.values(), scheme))


def _prefixes(uris: Iterable[str], scheme: str) -> tuple[Prefix, ...]:
    parts = (urlsplit(uri) for uri in uris)
    return tuple(sorted(Prefix(p.netloc, f"{unquote(p.path).strip('/')}/") for p in parts if p.scheme == scheme))
