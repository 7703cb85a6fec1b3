"""Settings of data: copies, and the nightly placement of tables."""

from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator

from infra.config.section import Section


class CopySettings(Section):
    """Copies between regions' buckets."""

    link_bytes_per_s: float | None = Field(None, gt=0)
    """What a process may use of a link from one region to another; None: as much as there is."""
    nightly_fraction: float = Field(0.5, gt=0, lt=1)
    """The share of nightly moves while copies on demand want bandwidth too."""
    keep_unfinished_s: float = Field(43200.0, gt=0)
    """How long parts of a copy that was interrupted are kept for it to go on."""
    drop_grace_s: float = Field(86400.0, ge=0)
    """How long a replica that is dropped can be taken back: then its objects are deleted."""
    scrub_every_s: float = Field(30 * 86400.0, gt=0)
    """Every copy of a partition is read and compared with its checksums this often."""
    scrub_bytes_per_s: float | None = Field(1e8, gt=0)
    """What verification in the background, and first checksums, may read in a second in each region; None: no limit."""
    checksum_at_once_bytes: int = Field(32 << 20, ge=0)
    """Partitions registered or appended by one request get their checksums in it up to so many bytes together; larger
    ones get them in the background."""


class WeightSettings(Section):
    """What the terms of the placement of tables weigh (MAST 3.3)."""

    read: float = Field(1.0, ge=0)
    gpu: float = Field(10.0, ge=0)
    """With 1, small regions stay overloaded: the squares of their shares are small."""
    storage: float = Field(1.0, ge=0)
    overload: float = Field(4.0, ge=0)
    by_priority: dict[int, Annotated[float, Field(ge=0)]] = {1: 4.0, 2: 2.0}
    """A level that is not here weighs 1."""


class CorrelatedSettings(Section):
    """Two regions that may fail together."""

    regions: tuple[str, str]
    probability: float = Field(ge=0, le=1)


class ReplicaSettings(Section):
    """What extra replicas are for (MAST 3.5)."""

    correlated: tuple[CorrelatedSettings, ...] = ()
    """Pairs that are not here do not fail together."""
    disaster_recovery_level: int = Field(7, ge=0, le=7)
    """Tables that a job of this priority or a higher one reads get a replica outside their home; 0: none do."""
    hot_part: float = Field(0.5, ge=0, le=1)
    """The part of the storage that is left which hot tables may take."""
    hot_jobs: int = Field(10, ge=1)
    """A table that at least so many jobs of a GPU type read is hot for that type."""


class NightlySettings(Section):
    """The nightly run of Tetris: when it starts, how long it may take, and how much it moves."""

    start: str | None = Field("02:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """A time of day in `time_zone`; None: only when an operator asks for it."""
    time_zone: str = "UTC"
    jitter_s: float = Field(300.0, ge=0)
    """The start is so much later at most, by chance."""
    catch_up_s: float = Field(3600.0, gt=0)
    """A start that was missed, since Temporal was away, is made up for this long."""
    deadline_s: float = Field(6 * 3600.0, gt=0)
    """No move starts later than this after the start of the run; a move that has started is finished."""
    solve_s: float = Field(600.0, ge=0)
    at_once: int = Field(4, ge=1, le=64)
    """Moves at the same time."""
    daily_quota_bytes: float | None = Field(None, ge=0)
    """What may be copied on one day of `time_zone`; what is left of it is not carried over. None: no limit."""
    grace_s: float = Field(86400.0, ge=0)
    """How long the old home's copy stays after a move."""

    @field_validator("time_zone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("must be a time zone's name, such as UTC or Europe/Berlin") from None
        return name


class TetrisSettings(Section):
    """The slow path: which region is home to each table, and its replicas."""

    window_days: float = Field(30.0, gt=0)
    """Runs of so many days make up the recurring jobs."""
    weights: WeightSettings = WeightSettings()
    home_threshold: float = Field(0.9, ge=0, le=1)
    """The fraction of high-priority GPU hours whose region has their hardware."""
    replicas: ReplicaSettings = ReplicaSettings()
    nightly: NightlySettings = NightlySettings()
