"""Types of the JSON objects that the API returns about data."""

from typing import Any, TypedDict


class Replica(TypedDict):
    """A replica of a table in a region; `state` is copying, ready or deleting."""

    region: str
    state: str
    whole: bool
    partitions: int
    stale_since: str | None
    topping_up: bool
    verified_at: str | None
    wrong_since: str | None
    wrong: str | None
    kept_because: str | None
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


class Verification(TypedDict):
    """A requested verification. A replica in `regions` is verified when its `verified_at` is at or after `asked_at`."""

    asked_at: str
    regions: list[str]


class Partition(TypedDict):
    """A partition of a table."""

    name: str
    location: str
    size_bytes: int
    checksum: str | None
    created_at: str


class Recorded(TypedDict):
    """The number of runs that were recorded, and the number that were known before."""

    recorded: int
    known: int


class Night(TypedDict):
    """A night of the placement of tables; `state` is planning, moving, ended or failed."""

    id: str
    dry_run: bool
    state: str
    started_at: str
    planned_at: str | None
    deadline_at: str
    ended_at: str | None
    moves: dict[str, int]
    moved_bytes: int
    artifact_url: str | None
    problem: str | None
    report: dict[str, Any] | None


class Move(TypedDict):
    """A move of a night. `kind` is home, replica, refresh or drop; `state` is waiting, copying, done or left."""

    number: int
    kind: str
    table: str
    source_region: str
    target_region: str
    size_bytes: int
    state: str
    left_because: str | None
    begun_at: str | None
    ended_at: str | None
    why: dict[str, Any]


class Assigned(TypedDict):
    """The number of partitions that were assigned to another datacenter, and the number that were already there."""

    assigned: int
    unchanged: int
