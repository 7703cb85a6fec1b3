"""The systems that are compared (sections IX.A and appendix C), as choices of the same simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from reclaim.destinations import DEFAULT_RULES, Rules
from reclaim.intervals import P1Settings
from reclaim.joint import DEFAULT_POLICY, EARLY_HORIZON_S, EARLY_PERIOD_S, Policy
from reclaim.traffic import RESEARCH_SHARE

_P1 = P1Settings()


class Saving(StrEnum):
    """How the interval between checkpoints is chosen."""

    FIXED = "fixed"
    P1 = "p1"
    MARGINAL = "marginal"
    """One interval from the means of hazard and 1/B over the last day: pi_ind of theorem 2."""
    ORACLE = "oracle"


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
    ORACLE = "oracle"


class Store(StrEnum):
    """Where checkpoints are."""

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
    loss_budget_s: float = 60.0
    """L_max of every job. The paper gives none; see docs/reclaim-experiments.md for its calibration."""
    restart_s: float | None = None
    """T_r that decisions assume; None: the true one."""
    window_days: int = 14
    """The window of the hazard's levels."""
    hazard_confidence: float = 0.8
    bandwidth_confidence: float = 0.9
    """The confidence of the bandwidth that deadlines count on..."""
    budget_confidence: float = 0.5
    """...and of the budget that P1 divides: a share of the bandwidth over hours, which no single minute endangers."""
    period_s: float = 600.0
    """The control period of P1."""
    traffic_period_s: float = 10.0
    """The control period of P3: its rates follow the bandwidth of the period before."""
    early_period_s: float = EARLY_PERIOD_S
    """The time between two searches for early moves."""
    early_horizon_s: float = EARLY_HORIZON_S
    """The horizon of forecasts for early moves, at most; the rest of the job if that is shorter."""


@dataclass(frozen=True)
class System:
    """A system."""

    name: str
    about: str
    saving: Saving = Saving.FIXED
    interval_s: float = 1800.0
    """The interval of `Saving.FIXED`."""
    choosing: Choosing = Choosing.RANDOM
    is_shaped: bool = False
    """Whether P3 admits migrations and limits traffic."""
    uses_notice: bool = True
    """Whether a job moves within its notice. Otherwise it runs until its machine leaves."""
    moves_early: bool = False
    as_live: bool = False
    """Whether `Choosing.JOINT` uses one bandwidth for all checkpoints, as `reclaim.forecasts` does."""
    store: Store = Store.BUILDING
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
        saving=Saving.P1 if p1 else Saving.FIXED,
        choosing=Choosing.P2 if p2 else Choosing.RANDOM,
        is_shaped=p3,
    )


ABLATION = tuple(
    _ablation(*flags)
    for flags in (
        (False, False, False), (True, False, False), (False, True, False), (False, False, True),
        (True, True, False), (True, False, True), (False, True, True), (True, True, True),
    )
)  # fmt: skip
"""All combinations of the protocols, in the order of Table IV."""
_ALL = replace(ABLATION[-1], name="reclaimnet", about="P1, P2 and P3")
_SLURM = System(
    "slurm-pr",
    "preempt and requeue: 10 minutes to one file system for all buildings, no use of notices, the first free machine",
    interval_s=600.0, choosing=Choosing.FIRST, uses_notice=False, requeue_s=120.0, store=Store.CENTRAL,
)  # fmt: skip
SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        _SLURM,
        replace(_SLURM, name="slurm-pr-local", about="slurm-pr with a store in each building", store=Store.BUILDING),
        System(
            "no-migration", "30 minutes to the machine's own disk; the job waits for its machine",
            choosing=Choosing.HOME, uses_notice=False, store=Store.OWN_DISK,
        ),
        System("static", "10 minutes, moves within the notice to a random machine", interval_s=600.0),
        System(
            "bamboo-like", "a shadow on another machine, 5 minutes behind, for 10 % more computation",
            interval_s=300.0, uses_notice=False, has_shadow=True, slowdown=0.1,
        ),
        replace(ABLATION[5], name="random-dst", about="P1 and P3, a random destination"),
        replace(ABLATION[4], name="no-shaping", about="P1 and P2, no shaping"),
        replace(_ALL, name="tv-fi", about="reclaimnet with intervals from the means of the last day",
                saving=Saving.MARGINAL),
        _ALL,
        System(
            "oracle", "true hazard and bandwidth, intervals and destinations with the least expected loss",
            saving=Saving.ORACLE, choosing=Choosing.ORACLE, is_shaped=True,
        ),
        replace(_ALL, name="joint", about="beyond the paper: interval and destination together, early moves",
                choosing=Choosing.JOINT, moves_early=True),
        replace(_ALL, name="joint-live", about="joint as on a live fleet with reclaim.forecasts",
                choosing=Choosing.JOINT, moves_early=True, as_live=True),
        *ABLATION,
    )
}  # fmt: skip
"""All systems by name. `p1+p2+p3` is `reclaimnet`, `p1+p2` is `no-shaping`, `p1+p3` is `random-dst`."""
TABLE_3 = (
    "slurm-pr", "no-migration", "static", "bamboo-like", "random-dst", "no-shaping", "tv-fi", "reclaimnet", "oracle",
)  # fmt: skip
"""The systems of Table III, in its order."""
