"""What a simulation assumes: costs, the clock, objectives, and what is drawn where a trace is silent."""

from math import exp, log
from statistics import NormalDist
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from infra.config import SchedulerSettings
from infra.errors import ConfigurationError

LEVELS = range(1, 8)
LIVE = SchedulerSettings()
"""What the live scheduler does by default, the simulator does by default."""
_NORMAL = NormalDist()


def fit_lognormal(p50: float, p90: float, p99: float) -> tuple[float, float]:
    """The (mu, sigma) of a lognormal: the median exactly, sigma by least squares over the other two quantiles' logs.

    For MAST 5.5 (150, 278, 449 s): sigma 0.474, whose P90 is 275 s and P99 451 s.
    """
    mu = log(p50)
    z90, z99 = _NORMAL.inv_cdf(0.90), _NORMAL.inv_cdf(0.99)
    return mu, (z90 * (log(p90) - mu) + z99 * (log(p99) - mu)) / (z90**2 + z99**2)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(_Part):
    """All that may be set under `simulation:` in the fleet file, or by `--param NAME=VALUE`. Times are seconds."""

    provisioning_p50_s: float = Field(150.0, ge=0)
    provisioning_p90_s: float = Field(278.0, ge=0)
    provisioning_p99_s: float = Field(449.0, ge=0)
    checkpoint_interval_s: float = Field(1800.0, gt=0)
    """Work between two periodic checkpoints of a running workload."""
    eviction_s: float = Field(60.0, ge=0)
    """From the notice to the last slot given up: the flush, the stop, the clean-up."""
    flush_succeeds: float = Field(1.0, ge=0, le=1)
    """The share of evictions in which the checkpoint of the notice is saved within the grace."""
    tick_spacing_s: float = Field(10.0, gt=0)
    """A change starts a pass at once, but never sooner than this after the pass before. The live scheduler's pauses are
    shorter, and follow from how long its passes take."""
    full_scan_s: float = Field(LIVE.scan_interval_s, gt=0)
    """The longest time between two passes while something waits (MAST 5.4); fair shares are renewed as often."""
    batch: int = Field(LIVE.batch, ge=1)
    """Workloads from the queue's head that all regions bid on at once."""
    min_runtime_s: float = Field(LIVE.min_runtime_s, ge=0)
    """No workload is evicted sooner after its start."""
    reserve_after_s: float = Field(LIVE.reserve_after_s, ge=0)
    """A gang that has waited longer reserves what it needs as it frees up; infinity: none does."""
    w_age: float = Field(LIVE.w_age, ge=0)
    age_cap_s: float = Field(LIVE.age_cap_s, ge=0)
    w_fair: float = Field(LIVE.w_fair, ge=0)
    fair_window_s: float = Field(LIVE.fair_window_s, gt=0)
    objective_s: dict[int, float] = Field(default_factory=lambda: {1: 300.0, 2: 300.0, 3: 1800.0, 4: 1800.0})
    """Level to the longest time from submission or preemption to award; a level that is not there has none."""
    priority_percent: dict[int, float] = Field(
        default_factory=lambda: {1: 3.0, 2: 20.0, 3: 16.0, 4: 54.0, 5: 0.2, 6: 0.5, 7: 6.02}
    )
    """How priorities are drawn; what is left of 100 did not specify one, which makes it the lowest level (7)."""
    candidate_regions_percent: dict[int, float] = Field(default_factory=lambda: {1: 15.0, 2: 25.0, 3: 20.0})
    """How many of the regions that could hold a gang have its data; what is left of 100 is all of them."""
    cpus_per_gpu: float = Field(4.0, ge=0)
    cpus_without_gpu: float = Field(1.0, gt=0)
    memory_bytes_per_gpu: int = Field(32 << 30, ge=0)
    memory_bytes_without_gpu: int = Field(4 << 30, ge=0)
    gpus_per_machine: int = Field(8, ge=1)
    """A trace that only says how many GPUs: more than this become tasks of a machine each."""
    copy_days: int = Field(7, ge=0)
    """Copies that `--scale` makes are submitted up to so many whole days before or after their original,"""
    copy_jitter_s: float = Field(1800.0, ge=0)
    """and up to this much sooner or later at that."""

    @field_validator("objective_s", "priority_percent")
    @classmethod
    def _by_level(cls, value: dict[int, float]) -> dict[int, float]:
        wrong = sorted(level for level in value if level not in LEVELS)
        if wrong:
            raise ValueError(f"has levels {wrong}; levels are 1 (highest) to 7")
        return value

    @field_validator("priority_percent", "candidate_regions_percent")
    @classmethod
    def _parts_of_100(cls, value: dict[int, float]) -> dict[int, float]:
        if any(part < 0 for part in value.values()) or sum(value.values()) > 100 + 1e-9:
            raise ValueError("must be percentages that are not below 0 and not above 100 in all")
        return value

    @field_validator("candidate_regions_percent")
    @classmethod
    def _counts(cls, value: dict[int, float]) -> dict[int, float]:
        if any(count < 1 for count in value):
            raise ValueError("names numbers of regions, each at least 1")
        return value

    def provisioning_s(self, chance: float) -> float:
        """The provisioning delay at a quantile `chance` in (0, 1)."""
        if self.provisioning_p50_s == 0:
            return 0.0
        mu, sigma = fit_lognormal(self.provisioning_p50_s, self.provisioning_p90_s, self.provisioning_p99_s)
        return exp(mu + sigma * _NORMAL.inv_cdf(chance))


def override(settings: Settings, assignments: tuple[str, ...]) -> Settings:
    """Settings with `NAME=VALUE` assignments on top; a key of a mapping is `NAME.KEY=VALUE`.

    Raises:
        ConfigurationError: a name that is none, or a value that cannot be.
    """
    body: dict[str, Any] = settings.model_dump()
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        field, dot, key = name.partition(".")
        if not equals or field not in body or (dot != "") != isinstance(body[field], dict):
            raise ConfigurationError(f"--param {assignment}: must be NAME=VALUE, where NAME is of: {_names(settings)}")
        if dot:
            body[field] = {**body[field], key: value}
        else:
            body[field] = value
    try:
        return Settings.model_validate(body)
    except ValidationError as error:
        raise ConfigurationError("; ".join(problems(error))) from None


def problems(error: ValidationError) -> list[str]:
    """Every problem as one line: field, value, what would be right."""
    return [f"{'.'.join(str(p) for p in e['loc'])}: {e['input']!r}: {e['msg']}" for e in error.errors()]


def _names(settings: Settings) -> str:
    return ", ".join(f"{n}.KEY" if isinstance(v, dict) else n for n, v in settings.model_dump().items())
