"""Beyond the paper: interval and destination decided together, and moves before the owner asks (its future work).

Both use one model of a job's expected loss over a horizon H at a node d with the interval Delta:

    loss(d, Delta) = E_d (Delta / 2 + T_next(d)) + N_d T_next(d) + H s / Delta

E_d and N_d are the expected departures without and with notice in the horizon (the integrals of the hazards), T_next(d)
is the mean time of a migration from d to the other candidates, and s is the time for which a save stalls the job. The
first term contains the work that is done again, the last term is the cost of saving. Equation 1 has s = C / b_d, the
whole time of the transfer; a save in the background stalls for a small part of it. The best interval is that of
equation 9 with lambda = E_d / H.

A job moves early only if that is expected to save more than the move costs. A least stay and a limit for each day keep
jobs from moving back and forth.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Bools, Floats, Ints, check_numbers, column
from reclaim.buildings import DEFAULT_RULES, Rules
from reclaim.intervals import P1Settings, intervals
from research.reclaim.algorithm_2 import Algorithm2Choices, Constraint, Nodes, assign, least, removed_by
from research.reclaim.destinations import Leaving, Network
from research.reclaim.topology import NOWHERE

HOUR_S, DAY_S = 3600.0, 86_400.0
EARLY_HORIZON_S = 96 * HOUR_S
"""The longest horizon of forecasts for early moves; a job that ends before has a shorter one."""


@dataclass(frozen=True)
class Outlook:
    """The expected departures, the bandwidth and the limits of each node while a job runs there."""

    horizon_s: Floats
    """H for each job: the rest of the job, or less. What differs between owners, lasts for days."""
    emergencies: Floats
    """E_d, one row for each job, one column for each node."""
    notices: Floats
    """N_d, likewise."""
    write_bytes_s: Floats
    """b_d, the bandwidth for checkpoints at each node."""
    loss_budget_s: Floats
    """L_max, the mean work that a departure may cost each job."""
    stall_s: Floats | None = None
    """s, how long a save stalls each job; None: C / b_d."""

    @classmethod
    def of(
        cls,
        jobs: int,
        nodes: int,
        *,
        horizon_s: ArrayLike,
        emergencies: ArrayLike,
        write_bytes_s: ArrayLike,
        loss_budget_s: ArrayLike,
        notices: ArrayLike = 0.0,
        stall_s: ArrayLike | None = None,
    ) -> "Outlook":
        """Returns the outlook. Departures may be given for each node only; a single number applies to all.

        Raises:
            ValueError: a size is wrong, or an element is out of its range.
        """
        return cls(
            column("horizon_s", horizon_s, jobs, positive=True),
            _table("emergencies", emergencies, jobs, nodes),
            _table("notices", notices, jobs, nodes),
            column("write_bytes_s", write_bytes_s, nodes, positive=True),
            column("loss_budget_s", loss_budget_s, jobs, positive=True),
            None if stall_s is None else column("stall_s", stall_s, jobs),
        )

    def loss_s(self, job: int, checkpoint_bytes: float, next_s: Floats, write_share: float) -> tuple[Floats, Floats]:
        """Returns the least expected loss of a job at each node in seconds, and the interval that has it."""
        events, horizon_s = self.emergencies[job], self.horizon_s[job]
        stall_s = checkpoint_bytes / self.write_bytes_s
        if self.stall_s is not None:
            stall_s = np.full(len(stall_s), self.stall_s[job])
        interval_s = intervals(
            events / horizon_s * HOUR_S, checkpoint_bytes, self.write_bytes_s, self.loss_budget_s[job], write_share,
            stall_s,
        ).interval_s  # fmt: skip
        saving_s = np.divide(horizon_s * stall_s, interval_s, out=np.zeros_like(stall_s), where=stall_s > 0)
        again_s = events * (interval_s / 2 + next_s) + self.notices[job] * next_s
        return again_s + saving_s, interval_s


def _table(name: str, values: ArrayLike, jobs: int, nodes: int) -> Floats:
    found = np.broadcast_to(np.asarray(values, np.float64), (jobs, nodes))
    if not ((found >= 0) & np.isfinite(found)).all():
        raise ValueError(f"{name}: from {found.min()} to {found.max()}: must be 0 or more and finite")
    return found


@dataclass(frozen=True)
class Policy:
    """The parameters of early moves."""

    write_share: float = P1Settings.write_share
    """P1's beta, the share of a job's bandwidth for checkpoints."""
    reserved_weight: float = 1.0
    """The price of a second in which GPUs are reserved at the destination, in seconds of lost work. The job's own GPUs
    wait as long."""
    traffic_weight: float = 0.1
    """The price of a second of transfer, in seconds of lost work: other migrations and research use the links, too."""
    margin: float = 0.0
    """A move must save its own cost and this share of it."""
    least_stay_s: float = 3600.0
    """The time after a move of a job before it may move early again."""
    most_per_day: int = 4
    """Early moves of a job in any 24 hours."""
    most_at_once: int = 4
    """Early moves of one decision. The costs assume that few transfers share a link."""

    def __post_init__(self) -> None:
        if not 0 < self.write_share <= 1:
            raise ValueError(f"write_share: {self.write_share}: must be above 0 and at most 1")
        for name in (
            "reserved_weight", "traffic_weight", "margin", "least_stay_s", "most_per_day", "most_at_once",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be 0 or more")

    def cost_s(self, migration_s: Floats, restart_s: float) -> Floats:
        """Returns the cost of early moves with these T_mig: T_mig at both ends, and the price of the traffic."""
        return (1 + self.reserved_weight) * migration_s + self.traffic_weight * (migration_s - restart_s)

    def pays(self, gain_s: Floats, cost_s: Floats) -> Bools:
        """Returns which early moves pay. `gain_s` is the loss that a move avoids, less its cost."""
        return (gain_s > 0) & (gain_s >= self.margin * cost_s)


DEFAULT_POLICY = Policy()


@dataclass(frozen=True)
class JointChoices:
    """Destinations, with the interval at each destination."""

    choices: Algorithm2Choices
    """`score_s` is the time of the migration plus the expected loss at the destination."""
    interval_s: Floats
    """nan for jobs without a destination."""


def choose_jointly(
    network: Network,
    nodes: Nodes,
    leaving: Leaving,
    outlook: Outlook,
    rules: Rules = DEFAULT_RULES,
    policy: Policy = DEFAULT_POLICY,
) -> JointChoices:
    """Returns for each leaving job the destination and the interval with the least expected loss, T_mig included.

    The candidates are those of algorithm 2. Distance is part of the loss, so candidates in the same building are not
    preferred a second time.
    """
    intervals = np.full((len(leaving), network.topology.nodes), np.nan)

    def score(job: int, candidates: Bools, migration_s: Floats) -> tuple[Ints, Floats]:
        size = leaving.checkpoint_bytes[job]
        next_s = network.next_s(candidates, size, leaving.restart_s[job])
        loss_s, intervals[job] = outlook.loss_s(job, size, next_s, policy.write_share)
        pool = np.flatnonzero(candidates)
        return pool, migration_s[pool] + loss_s[pool]

    choices = assign(network, nodes, leaving, rules, score)
    chosen = choices.destination
    found = intervals[np.arange(len(leaving)), np.maximum(chosen, 0)]
    return JointChoices(choices, np.where(chosen == NOWHERE, np.nan, found))


@dataclass(frozen=True)
class EarlyMoves:
    """Which jobs move before their owner asks, in the order of the jobs."""

    destination: Ints
    """NOWHERE: the job stays."""
    gain_s: Floats
    """The expected loss that the move avoids, less its cost; 0 for jobs that stay."""
    interval_s: Floats
    """The interval at the destination; nan for jobs that stay."""


def early_moves(
    network: Network,
    nodes: Nodes,
    jobs: Leaving,
    outlook: Outlook,
    moved_s: Floats,
    now_s: float,
    rules: Rules = DEFAULT_RULES,
    policy: Policy = DEFAULT_POLICY,
) -> EarlyMoves:
    """Returns the moves that are expected to pay, those that gain most first.

    `jobs.source` is the node where each job runs. `moved_s` has a row for each job with the times of its latest moves,
    at least `policy.most_per_day` of them, in any order, -infinity for none.

    A job moves only to a node with fewer expected departures than its own. The loss avoided must exceed the cost of the
    move, which is T_mig at both ends and the price of its traffic, by `policy.margin`.

    Raises:
        ValueError: `moved_s` has too few columns.
    """
    count = len(jobs)
    check_numbers("source", jobs.source, network.topology.nodes)
    if moved_s.shape[1] < policy.most_per_day:
        raise ValueError(f"moved_s: {moved_s.shape[1]} columns: must be {policy.most_per_day} or more")
    recent = (moved_s > now_s - DAY_S).sum(axis=1)
    rested = moved_s.max(axis=1, initial=-np.inf) <= now_s - policy.least_stay_s
    left = nodes.copy()

    def best(job: int) -> tuple[float, int, float]:
        """Returns the largest gain of a job, its node and the interval there; a gain of 0 if no move pays."""
        removed, migration_s = removed_by(network, left, jobs, job, rules)
        size, restart_s, source = float(jobs.checkpoint_bytes[job]), float(jobs.restart_s[job]), int(jobs.source[job])
        next_s = network.next_s(removed == Constraint.NONE, size, restart_s)
        loss_s, interval_s = outlook.loss_s(job, size, next_s, policy.write_share)
        departures = outlook.emergencies[job] + outlook.notices[job]
        cost_s = policy.cost_s(migration_s, restart_s)
        gain_s = loss_s[source] - loss_s - cost_s
        pays = policy.pays(gain_s, cost_s)
        pool = np.flatnonzero((removed == Constraint.NONE) & pays & (departures < departures[source]))
        if not len(pool):
            return 0.0, NOWHERE, np.nan
        node = pool[least(-gain_s[pool], migration_s[pool])]
        return float(gain_s[node]), int(node), float(interval_s[node])

    destination, gain_s, interval_s = np.full(count, NOWHERE), np.zeros(count), np.full(count, np.nan)
    gains_s = {job: best(job)[0] for job in np.flatnonzero(rested & (recent < policy.most_per_day)).tolist()}
    moves = 0
    for job in sorted((job for job, gain in gains_s.items() if gain > 0), key=lambda job: (-gains_s[job], job)):
        if moves == policy.most_at_once:
            break
        # Asked again, because an earlier move may have taken the node.
        gain, node, interval = best(job)
        if node != NOWHERE:
            destination[job], gain_s[job], interval_s[job] = node, gain, interval
            left.take(node, jobs, job)
            moves += 1
    return EarlyMoves(destination, gain_s, interval_s)
