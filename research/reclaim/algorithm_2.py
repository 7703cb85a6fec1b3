"""Algorithm 2 of ReclaimNet (TopoAware-Select, section VI): a node for each job that leaves its node.

A destination must have the memory and the capability that the job asks for, must not be overloaded, and must be
reachable before the source leaves. Of these candidates, those in the building of the source are preferred if there are
enough (lemma 3). The score of a candidate is that of `research.reclaim.destinations`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reclaim.arrays import Bools, Floats, Ints, check_numbers, column
from reclaim.buildings import DEFAULT_RULES, Rules
from research.reclaim.destinations import Leaving, Network, scores_s
from research.reclaim.topology import NOWHERE

I1 = NDArray[np.int8]
Score = Callable[[int, Bools, Floats], tuple[Ints, Floats]]
"""Given a job, its candidates and T_mig to each node, returns the candidates to choose from and their scores."""


class Constraint(IntEnum):
    """Why a node is not a candidate. A node counts for the first constraint that it fails, in this order."""

    NONE = 0
    """The node is a candidate."""
    SOURCE = 1
    """The node is the one that leaves."""
    MEMORY = 2
    CAPABILITY = 3
    LOAD = 4
    DEADLINE = 5


@dataclass(frozen=True)
class Nodes:
    """The free resources of the nodes, one element for each node of the topology."""

    memory_bytes: Floats
    """Free memory of the GPUs."""
    capability: Floats
    """The compute capability, such as 8.6."""
    load: Floats
    """The share of the node that is in use. Infinity excludes a node, such as one that is not lent now."""

    @classmethod
    def of(cls, count: int, *, memory_bytes: ArrayLike, capability: ArrayLike, load: ArrayLike) -> "Nodes":
        """Returns `count` nodes. A single number applies to all.

        Raises:
            ValueError: a column has a wrong size, or an element that is negative or not a number.
        """
        return cls(
            column("memory_bytes", memory_bytes, count),
            column("capability", capability, count),
            column("load", load, count, infinite=True),
        )

    def copy(self) -> "Nodes":
        """Returns a copy that `take` may change."""
        return Nodes(self.memory_bytes.astype(np.float64), self.capability, self.load.astype(np.float64))

    def take(self, node: int, leaving: Leaving, job: int) -> None:
        """Deducts from a node what a job needs."""
        self.memory_bytes[node] -= leaving.memory_bytes[job]
        self.load[node] += leaving.load[job]


@dataclass(frozen=True)
class Algorithm2Choices:
    """The decisions for all jobs, in their order."""

    destination: Ints
    """The chosen node; NOWHERE (FAIL): the job restarts from its last checkpoint when a node becomes free."""
    score_s: Floats
    """The score of the chosen node; nan without one."""
    migration_s: Floats
    """T_mig to the chosen node; nan without one."""
    counts: Ints
    """For each job the number of nodes by `Constraint`; NONE counts the candidates."""
    needs: Leaving
    rules: Rules

    def reason(self, job: int) -> str:
        """Returns the sentence that explains why a job has no destination: which constraint removed how many nodes."""
        count, needs = self.counts[job], self.needs
        words = {
            Constraint.SOURCE: "the source itself",
            Constraint.MEMORY: f"less than {needs.memory_bytes[job]:,.0f} bytes of free memory",
            Constraint.CAPABILITY: f"a capability below {needs.capability[job]:g}",
            Constraint.LOAD: f"a load above {self.rules.max_load:g}",
            Constraint.DEADLINE: f"no migration within the notice of {needs.notice_s[job]:g} s",
        }
        found = [f"{count[which]:,}: {text}" for which, text in words.items() if count[which]]
        return f"{count[Constraint.NONE]:,} of {count.sum():,} nodes can take the job ({'; '.join(found)})"


def removed_by(network: Network, nodes: Nodes, leaving: Leaving, job: int, rules: Rules) -> tuple[I1, Floats]:
    """Returns for each node the first `Constraint` that it fails for a job, and T_mig to each node."""
    migration_s, stay_s = network.times_s(leaving, job)
    removed = np.zeros(network.topology.nodes, np.int8)
    # The last assignment wins, so the constraints are checked from the last to the first.
    removed[~(stay_s <= leaving.notice_s[job])] = Constraint.DEADLINE
    removed[~(nodes.load <= rules.max_load)] = Constraint.LOAD
    removed[~(nodes.capability >= leaving.capability[job])] = Constraint.CAPABILITY
    removed[~(nodes.memory_bytes >= leaving.memory_bytes[job])] = Constraint.MEMORY
    removed[leaving.source[job]] = Constraint.SOURCE
    return removed, migration_s


def choose(
    network: Network, nodes: Nodes, leaving: Leaving, survival: ArrayLike, rules: Rules = DEFAULT_RULES
) -> Algorithm2Choices:
    """Returns the destinations of all jobs (algorithm 2 for each, see `assign`).

    `survival` is S_d(T_rem), the probability that a node stays for the rest of the job: one row for each job, or one
    for all.

    Raises:
        ValueError: a survival is not from 0 to 1.
    """
    survives = np.broadcast_to(np.asarray(survival, np.float64), (len(leaving), network.topology.nodes))
    if not ((survives >= 0) & (survives <= 1)).all():
        raise ValueError(f"survival: from {survives.min()} to {survives.max()}: must be from 0 to 1")
    building = network.topology.building[: network.topology.nodes]

    def score(job: int, candidates: Bools, migration_s: Floats) -> tuple[Ints, Floats]:
        pool = _preferred(candidates, building == building[leaving.source[job]], rules.min_local)
        return pool, scores_s(network, leaving, job, candidates, migration_s, survives[job], rules)[pool]

    return assign(network, nodes, leaving, rules, score)


def assign(network: Network, nodes: Nodes, leaving: Leaving, rules: Rules, score: Score) -> Algorithm2Choices:
    """Returns for each job the candidate with the least score, in time proportional to jobs times nodes.

    Jobs choose in the order of their notice, then of their position. A destination's free memory and load change with
    every job that it takes, so two jobs do not take the same memory. Scores are compared in microseconds, so that a
    rounding error does not decide. Of equal scores the least migration time is chosen, then the lowest node number.
    """
    jobs = len(leaving)
    check_numbers("source", leaving.source, network.topology.nodes)
    left = nodes.copy()
    destination = np.full(jobs, NOWHERE)
    score_s, migration_s = np.full(jobs, np.nan), np.full(jobs, np.nan)
    counts = np.zeros((jobs, len(Constraint)), np.int64)
    for job in np.argsort(leaving.notice_s, kind="stable"):
        removed, times_s = removed_by(network, left, leaving, job, rules)
        counts[job] = np.bincount(removed, minlength=len(Constraint))
        if not counts[job, Constraint.NONE]:
            continue
        pool, scores_s = score(job, removed == Constraint.NONE, times_s)
        best = least(scores_s, times_s[pool])
        chosen = pool[best]
        destination[job], score_s[job], migration_s[job] = chosen, scores_s[best], times_s[chosen]
        left.take(chosen, leaving, job)
    return Algorithm2Choices(destination, score_s, migration_s, counts, leaving, rules)


def _preferred(candidates: Bools, is_local: Bools, min_local: int) -> Ints:
    """Returns the nodes to score: the local candidates if there are enough, else all (algorithm 2, line 6)."""
    local = np.flatnonzero(candidates & is_local)
    return local if len(local) >= min_local else np.flatnonzero(candidates)


def least(scores_s: Floats, times_s: Floats) -> int:
    """Returns the position of the least score; of equal ones, of the least time; of equal ones, the first."""
    scores_us = np.rint(scores_s * 1e6)
    ties = np.flatnonzero(scores_us == scores_us.min())
    return int(ties[np.argmin(np.rint(times_s[ties] * 1e6))])
