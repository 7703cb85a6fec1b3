"""An instance of the data placement problem: regions, tables, and the jobs that read the tables (MAST 3.2, 3.3).

`docs/tetris-instances.md` describes each field; `tetris.documents` parses instances from JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

JobKind: TypeAlias = Literal["ml", "spark", "presto"]
DOCUMENT_VERSION = 1
LEAST_AMOUNT, MOST_AMOUNT = 1e-20, 1e20
"""Bounds of sizes, hours and weights that are not 0. Within them, sums and their squares are exact enough to be
compared, and no division is by a value that underflowed to 0."""
HIGH_PRIORITY = 2
"""Training jobs of this level or higher (1 and 2) count for the home threshold."""


@dataclass(frozen=True, slots=True)
class InstanceRegion:
    """A region's storage, GPU supply and CPU quotas."""

    name: str
    storage_bytes: float
    gpu_hours: Mapping[str, float] = field(default_factory=dict)
    """GPU type to hours of supply; an absent type has none."""
    cpu_hours: Mapping[str, float] = field(default_factory=dict)
    """App to its quota in CPU hours; an absent app has no limit."""


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """A table, with its home region and the regions of its replicas."""

    name: str
    size_bytes: float
    home: str
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurringJob:
    """A recurring job, with the demand that is predicted from its history."""

    name: str
    kind: JobKind
    tables: tuple[str, ...]
    priority: int
    app: str | None = None
    gpu_type: str | None = None
    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the terms of the objective."""

    read: float = 1.0
    gpu: float = 1.0
    storage: float = 1.0
    overload: float = 4.0
    by_priority: Mapping[int, float] = field(default_factory=dict)
    """Priority level to the weight of its GPU terms; an absent level has weight 1."""


@dataclass(frozen=True, slots=True)
class TetrisInstance:
    """A placement problem. Names are unique in each list; tables refer to regions by name, and jobs to tables."""

    regions: tuple[InstanceRegion, ...]
    tables: tuple[PlacedTable, ...]
    jobs: tuple[RecurringJob, ...]
    weights: Weights = Weights()
    home_threshold: float = 0.9
    move_quota_bytes: float | None = None


def instance_document(instance: TetrisInstance) -> dict[str, Any]:
    """Returns the instance as a document that can be written as JSON."""
    body = asdict(instance)
    body["weights"]["by_priority"] = {str(p): w for p, w in instance.weights.by_priority.items()}
    return {"version": DOCUMENT_VERSION, **body}


Homes: TypeAlias = Mapping[str, str]
"""A plan: table to its home region; an absent table keeps its home."""


def job_region(job: RecurringJob, tables: Mapping[str, PlacedTable], home: Homes) -> str | None:
    """Returns the region in which a job runs; None: nowhere.

    An ML job runs at the common home of its tables. A Spark or Presto job runs at the home of most of its tables; ties
    are broken by more bytes, then by the first name.
    """
    homes = {home[t] for t in job.tables}
    if job.kind == "ml":
        return homes.pop() if len(homes) == 1 else None
    count = {r: sum(home[t] == r for t in job.tables) for r in homes}
    size = {r: sum(tables[t].size_bytes for t in job.tables if home[t] == r) for r in homes}
    return min(homes, key=lambda r: (-count[r], -size[r], r), default=None)


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that a plan violates."""

    constraint: Literal["storage", "cpu_hours", "home_threshold", "move_quota"]
    where: str
    """For storage the region; for cpu_hours `region/app`; for the other constraints `all`."""
    by: float
    """The excess over the limit (for home_threshold, the shortfall) in bytes, CPU hours, a fraction, bytes."""


@dataclass(frozen=True, slots=True)
class PlanScore:
    """The cost of a plan: the unweighted terms, their weighted sum, and the violated constraints."""

    read: float
    gpu: float
    storage: float
    total: float
    violations: tuple[Violation, ...]


@dataclass(frozen=True, slots=True)
class Reads:
    """The partitions that jobs read. A partition is named `table/partition` (`domain.ids.split_read`)."""

    size_bytes: Mapping[str, float] = field(default_factory=dict)
    """Size of each partition in `by_job`."""
    by_job: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Job to the partitions that it reads. The job reads no other partition of the same tables; its tables without a
    partition here are read completely."""


def reads_document(reads: Reads) -> dict[str, Any]:
    """Returns the reads as a document that can be written as JSON."""
    return {
        "version": DOCUMENT_VERSION,
        "partitions": dict(reads.size_bytes),
        "reads": [{"job": job, "partitions": list(names)} for job, names in reads.by_job.items()],
    }
