"""What the API answers about data, as types: JSON objects as they come."""

from typing import TypedDict


class Replica(TypedDict):
    """A table's copy in a region; `state` is copying, ready or deleting."""

    region: str
    state: str
    whole: bool
    partitions: int
    stale_since: str | None
    topping_up: bool
    delete_at: str | None
    source_region: str | None
    done_bytes: int
    total_bytes: int
    requested_by: str | None
    created_at: str
    ready_at: str | None


class Table(TypedDict):
    """An input table."""

    name: str
    namespace: str
    size_bytes: int
    home_region: str
    created_at: str
    replicas: list[Replica]


class Partition(TypedDict):
    """A partition of a table."""

    name: str
    location: str
    size_bytes: int
    checksum: str | None
    created_at: str


class Recorded(TypedDict):
    """How many runs were recorded, and how many were known before."""

    recorded: int
    known: int
