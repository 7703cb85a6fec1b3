"""An instance of the placement of data: regions, tables, and the jobs that read them (MAST 3.2, 3.3).

`docs/tetris-instances.md` says what each field means; `tetris.documents` reads it from JSON.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

JobKind: TypeAlias = Literal["ml", "spark", "presto"]
DOCUMENT_VERSION = 1
LEAST_AMOUNT, MOST_AMOUNT = 1e-20, 1e20
"""Sizes, hours and weights are 0 or between these: sums of any number of them, and their squares, are then exact enough
to be compared, and no fraction is one of nothing."""
HIGH_PRIORITY = 2
"""Jobs of this level or higher (1, 2) count for the training that is at home."""


@dataclass(frozen=True, slots=True)
class Region:
    """What a region has to give."""

    name: str
    storage_bytes: float
    gpu_hours: Mapping[str, float] = field(default_factory=dict)
    """GPU type to hours of supply; a type that is not here has none."""
    cpu_hours: Mapping[str, float] = field(default_factory=dict)
    """App to its quota; an app that is not here has no limit."""


@dataclass(frozen=True, slots=True)
class Table:
    """Data that has one home, and may have replicas elsewhere."""

    name: str
    size_bytes: float
    home: str
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A recurring job, as its history says it will run again."""

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
    """What the terms of the objective weigh."""

    read: float = 1.0
    gpu: float = 1.0
    storage: float = 1.0
    overload: float = 4.0
    by_priority: Mapping[int, float] = field(default_factory=dict)
    """Priority level to the weight of its GPU terms; a level that is not here weighs 1."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Names are unique in each list; tables name regions, jobs name tables."""

    regions: tuple[Region, ...]
    tables: tuple[Table, ...]
    jobs: tuple[Job, ...]
    weights: Weights = Weights()
    home_threshold: float = 0.9
    move_quota_bytes: float | None = None


def instance_document(instance: Instance) -> dict[str, Any]:
    """The instance as its document, for JSON."""
    body = asdict(instance)
    body["weights"]["by_priority"] = {str(p): w for p, w in instance.weights.by_priority.items()}
    return {"version": DOCUMENT_VERSION, **body}


Homes: TypeAlias = Mapping[str, str]
"""A plan: table to its home region; a table that is not here stays."""


def job_region(job: Job, tables: Mapping[str, Table], home: Homes) -> str | None:
    """Where a job runs; None: nowhere.

    ML: the common home of its tables. Spark and Presto: the home of the most of them, of the more bytes where that is a
    tie, of the first name where that is one too.
    """
    homes = {home[t] for t in job.tables}
    if job.kind == "ml":
        return homes.pop() if len(homes) == 1 else None
    count = {r: sum(home[t] == r for t in job.tables) for r in homes}
    size = {r: sum(tables[t].size_bytes for t in job.tables if home[t] == r) for r in homes}
    return min(homes, key=lambda r: (-count[r], -size[r], r), default=None)


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that a plan does not keep."""

    constraint: Literal["storage", "cpu_hours", "home_threshold", "move_quota"]
    where: str
    """The region; for cpu_hours `region/app`; for the others `all`."""
    by: float
    """How far over (or, for home_threshold, under) the limit: bytes, CPU hours, a fraction, bytes."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a plan costs: the terms before their weights, and their weighted sum."""

    read: float
    gpu: float
    storage: float
    total: float
    violations: tuple[Violation, ...]
