"""Settings of copies of data and of the nightly placement of tables."""

from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator

from infra.config.section import Section


class CopySettings(Section):
    """Copies of tables between the buckets of regions, and the verification of copies."""

    link_bytes_per_s: float | None = Field(None, gt=0)
    """Maximum bandwidth of one process from one region to another. None means no limit."""
    nightly_fraction: float = Field(0.5, gt=0, lt=1)
    """Fraction of the bandwidth for nightly moves while copies on demand use the same link."""
    keep_unfinished_s: float = Field(43200.0, gt=0)
    """How long the copied parts of an interrupted copy are kept so that it can be resumed, in seconds."""
    drop_grace_s: float = Field(86400.0, ge=0)
    """How long a dropped replica can be restored before its objects are deleted, in seconds."""
    scrub_every_s: float = Field(30 * 86400.0, gt=0)
    """Interval at which every copy of a partition is read and compared with its checksums, in seconds."""
    scrub_bytes_per_s: float | None = Field(1e8, gt=0)
    """Maximum read bandwidth of background verification and of first checksums in each region. None means no limit."""
    checksum_at_once_bytes: int = Field(32 << 20, ge=0)
    """Limit on the total size of partitions in one request up to which the request computes their checksums. Checksums
    beyond it are computed in the background."""


class WeightSettings(Section):
    """Weights of the terms in the objective of the placement of tables (MAST 3.3)."""

    read: float = Field(1.0, ge=0)
    gpu: float = Field(10.0, ge=0)
    """Weight of the GPU term. With a weight of 1 small regions stay overloaded, because the squares of their shares are
    small."""
    storage: float = Field(1.0, ge=0)
    overload: float = Field(4.0, ge=0)
    by_priority: dict[int, Annotated[float, Field(ge=0)]] = {1: 4.0, 2: 2.0}
    """Weight of a job by its priority level. Levels that are not listed have weight 1."""


class CorrelatedSettings(Section):
    """The probability that two regions fail at the same time."""

    regions: tuple[str, str]
    probability: float = Field(ge=0, le=1)


class ReplicaSettings(Section):
    """Replicas in addition to the home, for disaster recovery and for hot tables (MAST 3.5)."""

    correlated: tuple[CorrelatedSettings, ...] = ()
    """Pairs of regions with correlated failures. Failures of other pairs count as independent."""
    disaster_recovery_level: int = Field(7, ge=0, le=7)
    """Lowest priority (largest number) of a job whose tables get a replica outside their home. 0 disables this."""
    hot_part: float = Field(0.5, ge=0, le=1)
    """Maximum fraction of the remaining storage for replicas of hot tables."""
    hot_jobs: int = Field(10, ge=1)
    """A table is hot for a GPU type if at least this many jobs with that type read it."""


class NightlySettings(Section):
    """The nightly run of Tetris: its schedule, and its limits on time and copied bytes."""

    start: str | None = Field("02:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """Time of day in `time_zone` at which the run starts. None: it starts only on an operator's request."""
    time_zone: str = "UTC"
    jitter_s: float = Field(300.0, ge=0)
    """Maximum random delay of the start, in seconds."""
    catch_up_s: float = Field(3600.0, gt=0)
    """How late a run may still start if its start was missed because Temporal was unavailable, in seconds."""
    deadline_s: float = Field(6 * 3600.0, gt=0)
    """Time after the start of the run after which no move starts, in seconds. Moves that have started are finished."""
    solve_s: float = Field(600.0, ge=0)
    at_once: int = Field(4, ge=1, le=64)
    """Maximum number of concurrent moves."""
    daily_quota_bytes: float | None = Field(None, ge=0)
    """Maximum bytes copied per calendar day in `time_zone`. The unused part expires. None means no limit."""
    grace_s: float = Field(86400.0, ge=0)
    """How long the copy in the old home is kept after a move, in seconds."""

    @field_validator("time_zone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("must be a time zone's name, such as UTC or Europe/Berlin") from None
        return name


class TetrisSettings(Section):
    """Tetris, which decides the home region and the replicas of each table."""

    window_days: float = Field(30.0, gt=0)
    """Length of the window of past runs from which the recurring jobs are derived, in days."""
    weights: WeightSettings = WeightSettings()
    home_threshold: float = Field(0.9, ge=0, le=1)
    """Minimum fraction of the GPU hours of high-priority jobs that must be in a region with their GPU type."""
    replicas: ReplicaSettings = ReplicaSettings()
    nightly: NightlySettings = NightlySettings()
