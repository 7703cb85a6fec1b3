"""The settings of a simulation: delays, clock and objectives."""

from math import exp, log
from statistics import NormalDist
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from domain.documents import DocumentPart, LevelKey
from infra.config.scheduling import SchedulerSettings
from infra.documents import problem_lines
from infra.errors import ConfigurationError

S = TypeVar("S", bound="SimulationSettings")
LEVELS = range(1, 8)
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


class SimulationSettings(DocumentPart):
    """The settings under `simulation:` in the fleet file, or of `--param NAME=VALUE`. Times are seconds."""

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
    grow: bool = LIVE.grow
    """Whether running elastic workloads are started again with more tasks on slots that no workload waits for."""
    shrink: bool = LIVE.shrink
    """Whether an elastic workload that is evicted continues at once with the tasks that its evictor leaves it."""
    repair: bool = LIVE.repair
    """Whether a gang that loses a machine continues on its other machines and on free slots nearby."""
    moves_per_h: int = Field(LIVE.moves_per_h, ge=0)
    """Largest number of over-quota workloads that are moved in any hour, so that whole machines become free."""
    w_age: float = Field(LIVE.w_age, ge=0)
    age_cap_s: float = Field(LIVE.age_cap_s, ge=0)
    w_fair: float = Field(LIVE.w_fair, ge=0)
    w_user: float = Field(LIVE.w_user, ge=0)
    w_short: float = Field(LIVE.w_short, ge=0)
    fair_window_s: float = Field(LIVE.fair_window_s, gt=0)
    objective_s: dict[LevelKey, float] = Field(default_factory=lambda: {1: 300.0, 2: 300.0, 3: 1800.0, 4: 1800.0})
    """Longest time from submission or preemption to award, by level; an absent level has no objective."""

    def provisioning_s(self, chance: float) -> float:
        """Returns the provisioning delay at the quantile `chance`, in (0, 1)."""
        if self.provisioning_p50_s == 0:
            return 0.0
        mu, sigma = fit_lognormal(self.provisioning_p50_s, self.provisioning_p90_s, self.provisioning_p99_s)
        return exp(mu + sigma * _NORMAL.inv_cdf(chance))


def override(settings: S, assignments: tuple[str, ...]) -> S:
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
        return type(settings).model_validate(body)
    except ValidationError as error:
        raise ConfigurationError("--param " + "; ".join(problem_lines(type(settings), error))) from None


def _names(settings: SimulationSettings) -> str:
    return ", ".join(f"{n}.KEY" if isinstance(v, dict) else n for n, v in settings.model_dump().items())
