"""What is said of a cloud that follows traces."""

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from domain.capacity import CapacityKind
from domain.ids import NAME_PATTERN
from infra.machine_shape import MachineShape

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MachineType(MachineShape):
    """A type of machine that can be launched."""

    usd_per_h: float = Field(ge=0)


class Zone(_Part):
    """A zone of a region. How many machines it has at a time follows a trace, if it has one."""

    region: Name
    kind: CapacityKind = CapacityKind.SPOT
    price_factor: float = Field(1.0, ge=0)
    """On the prices of the types of machine."""
    trace: Path | None = None
    """A JSON file, `{"metadata": {"gap_seconds": S}, "data": [N, ...]}`: machines that there are in each interval. It
    begins when the cloud is first used, and repeats."""
    counts: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The same, in place of a file."""
    gap_s: float = Field(300.0, gt=0)
    """With `counts`: length of an interval."""
    times: int = Field(1, ge=1)
    """For each machine of the trace there are so many."""
    most: int | None = Field(None, ge=0)
    """Machines at most, whatever the trace says; without a trace, machines that there are."""

    @model_validator(mode="after")
    def _one(self) -> "Zone":
        if self.trace is not None and self.counts:
            raise ValueError("trace and counts are two ways to say the same: give one of them")
        if self.trace is None and not self.counts and self.most is None:
            raise ValueError("give a trace, counts or most: how many machines there are")
        if self.trace is not None:
            _ = self.followed  # A file that is not usable is refused at the start.
        return self

    @cached_property
    def followed(self) -> tuple[float, tuple[int, ...]]:
        """Length of an interval in seconds, and machines in each; none: there is no trace.

        Raises:
            ValueError: the file is not usable.
        """
        if self.trace is None:
            return self.gap_s, self.counts
        try:
            body = json.loads(self.trace.read_bytes())
            gap_s, counts = float(body["metadata"]["gap_seconds"]), tuple(int(count) for count in body["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"trace: {self.trace}: is no trace: {error!r}") from None
        if gap_s <= 0 or not counts or min(counts) < 0:
            raise ValueError(f"trace: {self.trace}: must have intervals of more than 0 s, with 0 or more machines each")
        return gap_s, counts


class TraceSettings(_Part):
    """A cloud."""

    zones: dict[Name, Zone] = Field(min_length=1)
    machine_types: dict[Name, MachineType] = Field(min_length=1)
    start_median_s: float = Field(30.0, ge=0)
    """Half of the launches have a machine by then,"""
    start_sigma: float = Field(0.3, ge=0, le=3)
    """and the delays are log-normal: this is the standard deviation of their logarithms."""
    notice_s: float = Field(120.0, ge=0)
    """How long before it takes a machine the cloud says so; 0: it does not."""
    speed: float = Field(1.0, gt=0)
    """Seconds of the traces that pass in a second."""
    seed: int = 0
