"""The systems that are compared (sections IX.A and appendix C), as choices of the same simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from infra.config.scheduling import ReclaimSettings
from reclaim.buildings import DEFAULT_RULES, Rules
from reclaim.hazard import HazardSettings
from reclaim.intervals import P1Settings
from reclaim.traffic import RESEARCH_SHARE
from research.reclaim.joint import DEFAULT_POLICY, EARLY_HORIZON_S, Policy

_P1 = P1Settings()
_SHIPPED = ReclaimSettings()
"""The defaults of a live fleet: a run without other constants simulates exactly these."""


class IntervalRule(StrEnum):
    """How the interval between checkpoints is chosen."""

    FIXED = "fixed"
    P1 = "p1"
    """As a live fleet: equation 9 with the measured stall of a save limits the interval of the SDK's formula."""
    SDK = "sdk"
    """The SDK's formula alone, as without a coordinator (docs/cadence.md)."""
    PAPER = "paper"
    """Equation 9 as published: a save costs the time of its whole transfer."""
    MARGINAL = "marginal"
    """As `PAPER`, with one interval from the means of hazard and 1/B over the last day: pi_ind of theorem 2."""
    TRUE_RATES = "true rates"


class Choosing(StrEnum):
    """How the destination of a job is chosen."""

    P2 = "p2"
    JOINT = "joint"
    RANDOM = "random"
    """Uniformly among the machines with enough free GPUs and memory."""
    FIRST = "first"
    """The first machine with enough free GPUs and memory."""
    HOME = "home"
    """None: the job waits for its machine."""
    TRUE_RATES = "true rates"


class StorePlacement(StrEnum):
    """Where checkpoints are stored."""

    BUILDING = "building"
    """In a store of the machine's building."""
    CENTRAL = "central"
    """In one file system for all buildings, at the core of the campus."""
    OWN_DISK = "own disk"
    """On the machine: a job can only continue there."""


@dataclass(frozen=True)
class Parameters:
    """Constants that the sensitivity table varies."""

    rules: Rules = DEFAULT_RULES
    p1: P1Settings = _P1
    policy: Policy = DEFAULT_POLICY
    research_share: float = RESEARCH_SHARE
    """P3's beta."""
    loss_budget_s: float = _SHIPPED.loss_budget_s
    """L_max of every job."""
    checkpoint_bytes_s: float = _SHIPPED.checkpoint_bytes_s
    """The bandwidth of the checkpoints of all jobs that save to the same store, as payload."""
    restart_s: float | None = None
    """T_r that decisions assume; None: the true one."""
    window_days: int = HazardSettings.window_days
    """The window of the hazard's levels."""
    hazard_confidence: float = HazardSettings.confidence
    hazard_per_h: float | None = None
    """A constant hazard that P1 assumes of all machines; None: it is estimated."""
    bandwidth_confidence: float = 0.9
    """The confidence of the bandwidth that deadlines count on..."""
    budget_confidence: float = 0.5
    """...and of the budget that P1 divides: a share of the bandwidth over hours, which no single minute endangers."""
    period_s: float = _SHIPPED.control_period_s
    """The control period of P1."""
    traffic_period_s: float = 10.0
    """The control period of P3: its rates follow the bandwidth of the period before."""
    early_period_s: float = 3600.0
    """The time between two searches for early moves."""
    early_horizon_s: float = EARLY_HORIZON_S
    """The horizon of forecasts for early moves, at most; the rest of the job if that is shorter."""


PUBLISHED = Parameters(loss_budget_s=60.0, period_s=600.0)
"""The constants with which the paper's protocols are compared with its tables. The paper gives no L_max: see
docs/reclaim-experiments.md for its calibration."""


@dataclass(frozen=True)
class System:
    """A set of protocols that is compared: how its jobs save, where they go, and how they are admitted."""

    name: str
    about: str
    saving: IntervalRule = IntervalRule.FIXED
    interval_s: float = 1800.0
    """The interval of `IntervalRule.FIXED`."""
    choosing: Choosing = Choosing.RANDOM
    is_shaped: bool = False
    """Whether P3 admits migrations and limits traffic."""
    uses_notice: bool = True
    """Whether a job moves within its notice. Otherwise it runs until its machine leaves."""
    moves_early: bool = False
    as_live: bool = False
    """Whether `Choosing.JOINT` uses one bandwidth for all checkpoints, as `reclaim.forecasts` does."""
    store: StorePlacement = StorePlacement.BUILDING
    has_shadow: bool = False
    """Whether another machine holds the state, so that a restart transfers nothing."""
    requeue_s: float = 0.0
    """The time before a job that lost its machine may start again."""
    slowdown: float = 0.0
    """Computation beside the job's own, for each second of its work."""
    parameters: Parameters = field(default_factory=Parameters)

    def with_parameters(self, **changes: object) -> "System":
        """Returns the system with other constants."""
        return replace(self, parameters=replace(self.parameters, **changes))  # type: ignore[arg-type]


def _ablation(p1: bool, p2: bool, p3: bool) -> System:
    on = [name for name, is_on in (("p1", p1), ("p2", p2), ("p3", p3)) if is_on]
    return System(
        "+".join(on) or "none",
        f"{', '.join(on).upper() or 'no protocol'}; otherwise 30 minutes, a random destination, no shaping",
        saving=IntervalRule.PAPER if p1 else IntervalRule.FIXED,
        choosing=Choosing.P2 if p2 else Choosing.RANDOM,
        is_shaped=p3,
        parameters=PUBLISHED,
    )


ABLATION = tuple(
    _ablation(*flags)
    for flags in (
        (False, False, False), (True, False, False), (False, True, False), (False, False, True),
        (True, True, False), (True, False, True), (False, True, True), (True, True, True),
    )
)  # fmt: skip
"""All combinations of the protocols as published, in the order of Table IV."""
_PUBLISHED = replace(ABLATION[-1], name="published", about="P1, P2 and P3 as in the paper")
_ALL = replace(
    _PUBLISHED,
    name="reclaimnet",
    about="P1, P2 and P3 as on a live fleet",
    saving=IntervalRule.P1,
    parameters=Parameters(),
)
_SLURM = System(
    "slurm-pr",
    "preempt and requeue: 10 minutes to one file system for all buildings, no use of notices, the first free machine",
    interval_s=600.0, choosing=Choosing.FIRST, uses_notice=False, requeue_s=120.0, store=StorePlacement.CENTRAL,
)  # fmt: skip
SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        _SLURM,
        replace(_SLURM, name="slurm-pr-local", about="with a store in each building", store=StorePlacement.BUILDING),
        System(
            "no-migration", "30 minutes to the machine's own disk; the job waits for its machine",
            choosing=Choosing.HOME, uses_notice=False, store=StorePlacement.OWN_DISK,
        ),
        System("static", "10 minutes, moves within the notice to a random machine", interval_s=600.0),
        System(
            "bamboo-like", "a shadow on another machine, 5 minutes behind, for 10 % more computation",
            interval_s=300.0, uses_notice=False, has_shadow=True, slowdown=0.1,
        ),
        replace(ABLATION[5], name="random-dst", about="P1 and P3, a random destination"),
        replace(ABLATION[4], name="no-shaping", about="P1 and P2, no shaping"),
        replace(_PUBLISHED, name="tv-fi", about="published with intervals from the means of the last day",
                saving=IntervalRule.MARGINAL),
        _PUBLISHED,
        _ALL,
        replace(_ALL, name="constant-hazard", about="reclaimnet that assumes one departure of each machine in 24 hours",
                parameters=Parameters(hazard_per_h=1 / 24)),
        replace(_ALL, name="sdk", about="P2 and P3, and the SDK's formula for intervals", saving=IntervalRule.SDK),
        System(
            "true-rates", "true hazard and bandwidth, intervals and destinations with the least expected loss of each",
            saving=IntervalRule.TRUE_RATES, choosing=Choosing.TRUE_RATES, is_shaped=True, parameters=PUBLISHED,
        ),
        replace(_ALL, name="joint", about="beyond the paper: interval and destination together, early moves",
                choosing=Choosing.JOINT, moves_early=True),
        replace(_ALL, name="joint-live", about="joint as a live fleet could do it",
                choosing=Choosing.JOINT, moves_early=True, as_live=True),
        *ABLATION,
    )
}  # fmt: skip
"""All systems by name. `p1+p2+p3` is `published`, `p1+p2` is `no-shaping`, `p1+p3` is `random-dst`."""
TABLE_3 = (
    "slurm-pr", "no-migration", "static", "bamboo-like", "random-dst", "no-shaping", "tv-fi", "published",
    "true-rates",
)  # fmt: skip
"""The systems of Table III, in its order."""
