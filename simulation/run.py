"""Runs a policy on a scenario, and returns the outcome as JSON."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from domain.scheduling import CreditWeights
from gms.auction.auction import Options
from infra.errors import ConfigurationError
from simulation import result
from simulation.engine import Engine, Production
from simulation.hardware import Hardware
from simulation.meter import Meter, ratio
from simulation.policies import POLICIES, SchedulingPolicy, split_by_cluster
from simulation.scenario import Scenario as Scenario
from simulation.settings import SimulationSettings
from simulation.simulator import RunProgress, Simulator
from simulation.transitions import Happened

ROUNDED_S = 3


@dataclass(frozen=True)
class Span:
    """A time span, from `from_s` until before `to_s`, in seconds."""

    from_s: float = 0.0
    to_s: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.to_s:
            raise ConfigurationError(
                f"span {self.from_s:g}..{self.to_s:g}: must start at 0 or later, and end after its start"
            )


EVERYTHING = Span()


def check_policy(scenario: Scenario, policy: SchedulingPolicy) -> None:
    """Checks that a policy can run a scenario.

    Raises:
        ConfigurationError: the scenario has pools, and the policy requires a fixed fleet.
    """
    if scenario.sources.grows and (policy.binds_early or policy.fixed_fleet):
        able = [p.name for p in POLICIES.values() if not p.binds_early]
        raise ConfigurationError(f"--policy {policy.name}: must be one of {', '.join(able)} for a fleet with pools")


def credit_weights(settings: SimulationSettings) -> CreditWeights:
    """Returns the weights of the settings."""
    return CreditWeights(settings.w_age, settings.age_cap_s, settings.w_fair, settings.w_user, settings.w_short)


def engine_for(scenario: Scenario, policy: SchedulingPolicy) -> Engine:
    """Returns the policy's engine for a scenario.

    Raises:
        SimulationError: the policy's engine does not support the scenario.
    """
    s = scenario.settings
    machines = split_by_cluster(scenario.machines) if policy.by_cluster else scenario.machines
    if policy.engine is not None:
        return policy.engine(scenario, machines)
    options = Options(explain=False, reserve_after_s=s.reserve_after_s, may_evict=policy.may_evict)
    return Production(machines, credit_weights(s), options, flat_over_quota=policy.flat_over_quota)


@dataclass
class Run:
    """One run of a policy on a scenario."""

    scenario: Scenario
    policy: SchedulingPolicy
    follow: Callable[[Happened], None] | None = None
    change: str | None = None
    """Description of the change against the unchanged run of the same policy; None: no change."""
    interrupted: bool = False
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        scenario = self.scenario
        check_policy(scenario, self.policy)
        self._hardware = Hardware(scenario.possible)
        supply = dict.fromkeys(self._hardware.supply, 0) | Hardware(scenario.machines).supply
        self.meter = Meter(supply, scenario.measure_from_s, scenario.measure_to_s)
        self.engine = engine_for(scenario, self.policy)
        self.simulator = Simulator(scenario, self.policy, self.engine, self.meter, self.follow)

    def go(self, stop: Callable[[RunProgress], bool] | None = None) -> "Run":
        """Runs to the end, or until `stop` returns True: then `interrupted` is set."""
        began_s = time.perf_counter()
        self.interrupted = not self.simulator.run(stop)
        self.wall_s = time.perf_counter() - began_s
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome. All values except `decisions_per_s` are determined by the inputs and the seed."""
        counts, progress, scenario = self.engine.counts(), self.simulator.progress, self.scenario
        asked = counts.negative_hits + counts.negative_misses
        never = [w.id for w in scenario.workloads if not all(self._hardware.regions_for(job) for job in w.jobs)]
        return {
            "policy": self.policy.name,
            "seed": scenario.seed,
            "workloads": progress.arrived,
            "finished": progress.finished,
            **result.figures(self.meter.total),
            "decisions": counts.decisions,
            "decisions_per_s": round(counts.decisions / self.wall_s, 1) if self.wall_s else None,
            "negative_cache_hit_rate": ratio(counts.negative_hits, asked),
            "hourly": result.hourly(self.meter, scenario.starts_s),
            "run": {
                "interrupted": self.interrupted,
                "change": self.change,
                "started_s": scenario.starts_s,
                "ended_s": round(scenario.starts_s + progress.now_s, ROUNDED_S),
                "simulated_s": round(progress.now_s, ROUNDED_S),
                "events": progress.events,
                "workloads_in_all": progress.workloads,
                "queued_at_end": progress.queued,
                "fit_nowhere": sorted(never),
                "measured_from_s": scenario.starts_s + max(0.0, scenario.measure_from_s),
                "measured_to_s": round(scenario.starts_s + min(progress.now_s, scenario.measure_to_s), ROUNDED_S),
                "supply": self.meter.supply,
                "objective_s": {str(level): span_s for level, span_s in sorted(scenario.settings.objective_s.items())},
                "bad_rows": [],
                "pools": asdict(self.simulator.keeper.counts),
                **result.more(self.meter.total),
                **scenario.says,
            },
            **result.start_figures(self.meter.total),
        }
