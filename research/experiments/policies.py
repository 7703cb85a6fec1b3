"""The policies of the experiment, by name."""

from dataclasses import replace
from math import inf

from research.experiments.cases import MAST, OURS
from research.rivals.policies import ALL_POLICIES
from simulation.policies import SchedulingPolicy
from simulation.run import Scenario


def policy_of(name: str) -> SchedulingPolicy:
    """Returns the policy with a name; `mast` is `global` without the rules that MAST does not have."""
    if name == MAST:
        return replace(ALL_POLICIES[OURS], name=MAST, flat_over_quota=True)
    return ALL_POLICIES[name]


def scenario_for(scene: Scenario, name: str) -> Scenario:
    """Returns the scenario of a policy: `MAST` without reservations and weights of users and sizes."""
    if name != MAST:
        return scene
    off = {"reserve_after_s": inf, "w_user": 0.0, "w_short": 0.0}
    return replace(scene, settings=scene.settings.model_copy(update=off))
