"""Forecasts for live jobs: destinations by the expected loss, and moves before the owner asks (`reclaim.joint`).

The scheduler chooses the machines, so buildings are compared as a whole, on the network of `reclaim.buildings`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reclaim.arrays import Floats
from reclaim.buildings import Building, Departure, Migrations, Score
from reclaim.destinations import RESTART_S
from reclaim.joint import DEFAULT_POLICY, EARLY_HORIZON_S, Outlook, Policy

_SHORTEST_S = 60.0
"""No forecast looks ahead for less."""
Departures = tuple[float, float]
"""Expected departures: without notice, and with."""


@dataclass(frozen=True)
class Saving:
    """How a job saves, and what a departure may cost it."""

    save_bytes: float
    """What a save writes."""
    stall_s: float | None
    """How long a save stalls the job; None: the time of its transfer."""
    loss_budget_s: float
    """L_max."""
    most_bytes_s: float
    """The bandwidth for checkpoints that it gets at most."""


def horizon_s(remaining_s: float) -> float:
    """Returns how far forecasts for a job look ahead: its remaining runtime, but at most `EARLY_HORIZON_S`."""
    return min(max(remaining_s, _SHORTEST_S), EARLY_HORIZON_S)


@lru_cache(maxsize=4096)
def joint_score(
    buildings: tuple[Building, ...], job: Departure, saving: Saving, policy: Policy = DEFAULT_POLICY
) -> tuple[Score, ...]:
    """Returns the scores of all buildings for a job that has left a machine: T_mig, and the least expected loss there.

    The loss includes that of the best interval between checkpoints in each building, which P1 then sets. No building is
    `away`, because the distance is part of the score.

    Raises:
        ValueError: the building of the job is not listed.
    """
    ahead_s = horizon_s(job.remaining_s)
    there = np.array([b.rate.expected(ahead_s) for b in buildings])
    migrations = Migrations.of(buildings, job)
    loss_s = _loss_s(migrations, job, saving, (0.0, 0.0), there, policy)
    return tuple(Score(False, float(one_s)) for one_s in (migrations.migration_s + loss_s)[1::2])


def gains_s(
    buildings: Sequence[Building],
    job: Departure,
    saving: Saving,
    here: Departures,
    there: Sequence[Departures],
    policy: Policy = DEFAULT_POLICY,
) -> Floats:
    """Returns what an early move of a running job to each building gains, in seconds; minus infinity: it does not pay.

    A gain is the expected loss on the job's machines, less that in the building and the cost of the move. Like
    `joint.early_moves`, it counts only where fewer departures are expected than here. In its own building, the job
    moves to other machines.

    Args:
        buildings: the buildings.
        job: the job, where it runs.
        saving: how it saves.
        here: the departures that are expected of its machines within its `horizon_s`.
        there: the same for the machines that it would get in each building.
        policy: the parameters of early moves.

    Raises:
        ValueError: the building of the job is not listed, or a number is out of its range.
    """
    migrations = Migrations.of(buildings, job)
    loss_s = _loss_s(migrations, job, saving, here, np.array(there), policy)
    cost_s = policy.cost_s(migrations.migration_s, RESTART_S)[1::2]
    gain_s = loss_s[0] - loss_s[1::2] - cost_s
    counts = policy.pays(gain_s, cost_s) & (np.array(there).sum(axis=1) < sum(here))
    return np.where(counts, gain_s, -np.inf)


def _loss_s(
    migrations: Migrations, job: Departure, saving: Saving, here: Departures, there: Floats, policy: Policy
) -> Floats:
    """Returns the least expected loss at each node in seconds. No more than the whole horizon can be lost."""
    ahead_s = horizon_s(job.remaining_s)
    outlook = Outlook.of(
        1,
        1 + 2 * len(there),
        horizon_s=ahead_s,
        emergencies=np.concatenate([here[:1], np.repeat(there[:, 0], 2)]),
        notices=np.concatenate([here[1:], np.repeat(there[:, 1], 2)]),
        write_bytes_s=np.minimum(migrations.write_bytes_s, saving.most_bytes_s),
        loss_budget_s=saving.loss_budget_s,
        stall_s=saving.stall_s,
    )
    next_s = migrations.network.next_s(migrations.candidates, job.checkpoint_bytes, RESTART_S)
    return np.minimum(outlook.loss_s(0, saving.save_bytes, next_s, policy.write_share)[0], ahead_s)
