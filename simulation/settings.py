"""The settings of a simulation: delays, clock, objectives, and distributions of values that a trace lacks."""

from math import exp, log
from statistics import NormalDist
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, field_validator

from domain.documents import CountKey, LevelKey, Part, RuleError
from infra.config import SchedulerSettings
from infra.documents import problem_lines
from infra.errors import ConfigurationError

LEVELS = range(1, 8)
_PERCENTAGES = "Percentages sum to at most 100"
Percent = Annotated[float, Field(ge=0, le=100)]
LIVE = SchedulerSettings()
"""The defaults of the live scheduler, which are also the simulator's defaults."""
_NORMAL = NormalDist()


def fit_lognormal(p50: float, p90: float, p99: float) -> tuple[float, float]:
    """Returns (mu, sigma) of a lognormal with the median `p50`; sigma is the least squares fit to log P90 and log P99.

    For MAST 5.5 (150, 278, 449 s): sigma 0.474, with a P90 of 275 s and a P99 of 451 s.
    """
    mu = log(p50)
    z90, z99 = _NORMAL.inv_cdf(0.90), _NORMAL.inv_cdf(0.99)
    return mu, (z90 * (log(p90) - mu) + z99 * (log(p99) - mu)) / (z90**2 + z99**2)


class SimulationSettings(Part):
    """The settings under `simulation:` in the fleet file, or of `--param NAME=VALUE`. Times are seconds."""

    rules: ClassVar = (_PERCENTAGES,)

    provisioning_p50_s: float = Field(150.0, ge=0)
    provisioning_p90_s: float = Field(278.0, ge=0)
    provisioning_p99_s: float = Field(449.0, ge=0)
    checkpoint_interval_s: float = Field(1800.0, gt=0)
    """Work between two periodic checkpoints of a running workload."""
    eviction_s: float = Field(60.0, ge=0)
    """Time from the eviction notice until the last slot is released: final checkpoint, stop and clean-up."""
    flush_succeeds: float = Field(1.0, ge=0, le=1)
    """Share of evictions whose final checkpoint is saved within the grace."""
    tick_spacing_s: float = Field(10.0, gt=0)
    """Shortest time between two passes. A change starts a pass at once, if the pass before began this long ago.

    The live scheduler's pauses are shorter, and depend on how long its passes take.
    """
    full_scan_s: float = Field(LIVE.scan_interval_s, gt=0)
    """Longest time between two passes while workloads wait (MAST 5.4), and the interval at which shares are updated."""
    batch: int = Field(LIVE.batch, ge=1)
    """Number of workloads at the queue's head that are offered to all regions together."""
    min_runtime_s: float = Field(LIVE.min_runtime_s, ge=0)
    """A workload cannot be evicted earlier than this after its start."""
    reserve_after_s: float = Field(LIVE.reserve_after_s, ge=0)
    """A gang that has waited longer than this reserves slots as they become free; infinity: no reservations."""
    w_age: float = Field(LIVE.w_age, ge=0)
    age_cap_s: float = Field(LIVE.age_cap_s, ge=0)
    w_fair: float = Field(LIVE.w_fair, ge=0)
    fair_window_s: float = Field(LIVE.fair_window_s, gt=0)
    objective_s: dict[LevelKey, float] = Field(default_factory=lambda: {1: 300.0, 2: 300.0, 3: 1800.0, 4: 1800.0})
    """Longest time from submission or preemption to award, by level; an absent level has no objective."""
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

    def provisioning_s(self, chance: float) -> float:
        """Returns the provisioning delay at the quantile `chance`, in (0, 1)."""
        if self.provisioning_p50_s == 0:
            return 0.0
        mu, sigma = fit_lognormal(self.provisioning_p50_s, self.provisioning_p90_s, self.provisioning_p99_s)
        return exp(mu + sigma * _NORMAL.inv_cdf(chance))


def override(settings: SimulationSettings, assignments: tuple[str, ...]) -> SimulationSettings:
    """Returns the settings with `NAME=VALUE` assignments applied; the entry of a mapping is set by `NAME.KEY=VALUE`.

    Raises:
        ConfigurationError: an assignment has an unknown name or an invalid value.
    """
    body: dict[str, Any] = settings.model_dump()
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        field, dot, key = name.partition(".")
        if not equals or field not in body or (dot != "") != isinstance(body[field], dict):
            raise ConfigurationError(
                f"--param {assignment}: must be NAME=VALUE, where NAME is one of: {_names(settings)}"
            )
        if dot:
            body[field] = {**body[field], key: value}
        else:
            body[field] = value
    try:
        return SimulationSettings.model_validate(body)
    except ValidationError as error:
        raise ConfigurationError("--param " + "; ".join(problem_lines(SimulationSettings, error))) from None


def _names(settings: SimulationSettings) -> str:
    return ", ".join(f"{n}.KEY" if isinstance(v, dict) else n for n, v in settings.model_dump().items())
