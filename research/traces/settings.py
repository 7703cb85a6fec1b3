"""The settings of the simulation of a trace: also the distributions of values that the trace lacks."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from domain.documents import CountKey, LevelKey, RuleError
from simulation.settings import SimulationSettings

_PERCENTAGES = "Percentages sum to at most 100"
Percent = Annotated[float, Field(ge=0, le=100)]


class TraceSettings(SimulationSettings):
    """The settings under `simulation:` in the fleet file, or of `--param NAME=VALUE`."""

    rules: ClassVar = (_PERCENTAGES,)

    priority_percent: dict[LevelKey, Percent] = Field(
        default_factory=lambda: {1: 3.0, 2: 20.0, 3: 16.0, 4: 54.0, 5: 0.2, 6: 0.5, 7: 6.02}
    )
    """Percentage of workloads by priority level. The remainder to 100 has no priority, so it gets the lowest (7)."""
    candidate_regions_percent: dict[CountKey, Percent] = Field(default_factory=lambda: {1: 15.0, 2: 25.0, 3: 20.0})
    """Percentage of workloads by the number of regions, among those that could hold the gang, that have its data.

    For the remainder to 100, all of these regions have it.
    """
    cpus_per_gpu: float = Field(4.0, ge=0)
    cpus_without_gpu: float = Field(1.0, gt=0)
    memory_bytes_per_gpu: int = Field(32 << 30, ge=0)
    memory_bytes_without_gpu: int = Field(4 << 30, ge=0)
    gpus_per_machine: int = Field(8, ge=1)
    """For traces that only state a gang's GPUs: a gang with more GPUs than this has one task per machine."""
    users: int = Field(20, ge=1)
    """People of a tenant, for workloads without one in the trace: the k-th is drawn in proportion to 1/k."""
    limited_percent: Percent = 0.0
    """Percentage of workloads with a maximum runtime, of those without one in the trace: the duration times a factor.

    The factor is lognormal with a median of 2 and the sigma `limit_sigma`, but at least 1."""
    limit_sigma: float = Field(0.7, ge=0)
    copy_days: int = Field(7, ge=0)
    """`--scale` submits a copy up to this many whole days before or after its original."""
    copy_jitter_s: float = Field(1800.0, ge=0)
    """Random shift of a copy, earlier or later, in addition to `copy_days`."""

    @field_validator("priority_percent", "candidate_regions_percent")
    @classmethod
    def _parts_of_100(cls, value: dict[int, float]) -> dict[int, float]:
        if sum(value.values()) > 100 + 1e-9:
            raise RuleError(_PERCENTAGES, "must be percentages that sum to at most 100")
        return value
