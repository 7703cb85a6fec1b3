"""The settings of a cloud that follows traces."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from domain.availability import parse_counts
from domain.capacity import CapacityKind
from domain.documents import DocumentPart, Name, RuleError
from infra.machine_shape import MachineShape

_COUNTED = "A zone has a trace, counts or most, and not both of the first two"
_READABLE = "A trace is a file that can be read"


class MachineType(MachineShape):
    """A machine type that can be launched."""

    usd_per_h: float = Field(ge=0)


class TraceZone(DocumentPart):
    """A zone of a region. If it has a trace, its capacity follows the trace."""

    rules: ClassVar = (_COUNTED, _READABLE)

    region: Name
    kind: CapacityKind = CapacityKind.SPOT
    price_factor: float = Field(1.0, ge=0)
    """A factor on the prices of the machine types."""
    trace: Path | None = None
    """A JSON file, `{"metadata": {"gap_seconds": S}, "data": [N, ...]}`: the number of machines in each interval. The
    trace starts when the cloud is first used, and repeats."""
    counts: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The numbers of machines, in place of a trace file."""
    gap_s: float = Field(300.0, gt=0)
    """The length of an interval of `counts`."""
    times: int = Field(1, ge=1)
    """A factor on the numbers of the trace."""
    most: int | None = Field(None, ge=0)
    """The maximum number of machines; without a trace, the constant number of machines."""

    @model_validator(mode="after")
    def _one(self) -> "TraceZone":
        if self.trace is not None and self.counts:
            raise RuleError(_COUNTED, "trace and counts: set only one of them")
        if self.trace is None and not self.counts and self.most is None:
            raise RuleError(_COUNTED, "trace, counts or most: set at least one of them")
        if self.trace is not None:
            _ = self.followed  # Read the file now, so that an invalid file is refused at startup.
        return self

    @cached_property
    def followed(self) -> tuple[float, tuple[int, ...]]:
        """The length of an interval in seconds, and the number of machines in each; an empty tuple: there is no trace.

        Raises:
            ValueError: the trace file cannot be read, or is not valid.
        """
        if self.trace is None:
            return self.gap_s, self.counts
        try:
            return parse_counts(self.trace.read_bytes())
        except OSError as error:
            raise RuleError(_READABLE, f"trace: {self.trace}: is not a valid trace file: {error!r}") from None
        except ValueError as error:
            raise RuleError(_READABLE, f"trace: {self.trace}: {error}") from None


class TraceProviderSettings(DocumentPart):
    """The settings of one cloud."""

    zones: dict[Name, TraceZone] = Field(min_length=1)
    machine_types: dict[Name, MachineType] = Field(min_length=1)
    start_median_s: float = Field(30.0, ge=0)
    """The median time from a launch to the start of the machine."""
    start_sigma: float = Field(0.3, ge=0, le=3)
    """The standard deviation of the logarithm of the start time, which is log-normally distributed."""
    notice_s: float = Field(120.0, ge=0)
    """The time between a notice and the end of the machine; 0: there is no notice."""
    speed: float = Field(1.0, gt=0)
    """The seconds of trace time that pass in one second. All times above are seconds of the trace."""
    seed: int = 0
