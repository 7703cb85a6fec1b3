"""P2, where the work of a leaving node goes: the score of each destination (section VI, equation 11).

The score is the time of this migration, plus the expected time of the next one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Bools, Floats, Ints, column
from reclaim.buildings import RESTART_S, Rules
from research.reclaim.onward import Onward
from research.reclaim.topology import NOWHERE, Topology

COMMIT_S = 2.0
"""The commit of an uploaded checkpoint if nothing was measured."""


@dataclass(frozen=True)
class Leaving:
    """Jobs that have to leave their node, one element for each job."""

    source: Ints
    """The node of the job."""
    checkpoint_bytes: Floats
    """C, the size of the checkpoint."""
    upload_bytes: Floats
    """The part of C that is not in the store yet. 0 if the job continues from a checkpoint that is complete, as after a
    departure without notice. Used with stores."""
    memory_bytes: Floats
    """The memory that the job needs at its destination."""
    capability: Floats
    """The least compute capability that the job accepts."""
    load: Floats
    """The load that the job adds to its destination."""
    notice_s: Floats
    """Tau, the time until the source leaves. Infinity: no deadline, as for a job that restarts from its last
    checkpoint."""
    restart_s: Floats
    """T_r, the time from the arrival of the checkpoint until the job continues."""
    commit_s: Floats
    """The time from the last uploaded byte until the checkpoint is complete. Used with stores."""

    @classmethod
    def of(
        cls,
        source: ArrayLike,
        *,
        checkpoint_bytes: ArrayLike,
        memory_bytes: ArrayLike,
        upload_bytes: ArrayLike | None = None,
        notice_s: ArrayLike = np.inf,
        restart_s: ArrayLike = RESTART_S,
        commit_s: ArrayLike = COMMIT_S,
        capability: ArrayLike = 0.0,
        load: ArrayLike = 0.0,
    ) -> "Leaving":
        """Returns jobs, one for each element of `source`. A single number applies to all. None: all of C is uploaded.

        Raises:
            ValueError: a column has a wrong size, or an element that is negative or not a number.
        """
        nodes = np.asarray(source, np.int64)
        count = len(nodes)
        return cls(
            nodes,
            column("checkpoint_bytes", checkpoint_bytes, count),
            column("upload_bytes", checkpoint_bytes if upload_bytes is None else upload_bytes, count),
            column("memory_bytes", memory_bytes, count),
            column("capability", capability, count),
            column("load", load, count),
            column("notice_s", notice_s, count, infinite=True),
            column("restart_s", restart_s, count),
            column("commit_s", commit_s, count),
        )

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Network:
    """A topology, prepared for the choice of destinations."""

    topology: Topology
    onward: Onward
    stores: Ints | None
    """The store of each node; None: checkpoints go directly from node to node."""

    @classmethod
    def direct(cls, topology: Topology) -> "Network":
        """Returns the network of the paper, in which checkpoints go directly from node to node."""
        return cls(topology, Onward.of(topology), None)

    @classmethod
    def by_store(cls, topology: Topology) -> "Network":
        """Returns the network in which checkpoints go by way of the store of the source (`Topology.store_of`).

        Raises:
            ValueError: a node has no store.
        """
        stores = topology.store_of(np.arange(topology.nodes))
        if (stores == NOWHERE).any():
            node = int(np.flatnonzero(stores == NOWHERE)[0])
            raise ValueError(f"node {node}: no store: its building or its site must have one")
        return cls(topology, Onward.of(topology, stores), stores)

    def next_s(self, candidates: Bools, checkpoint_bytes: float, restart_s: float) -> Floats:
        """Returns T_mig_mean(d), the mean time of a migration from each node to the other candidates."""
        return self.onward.mean_s_byte(candidates) * checkpoint_bytes + restart_s

    def times_s(self, leaving: Leaving, job: int) -> tuple[Floats, Floats]:
        """Returns, for each destination, the migration time T_mig of a job, and how long the source machine is needed.

        Directly, the source stays until the job runs at its destination, as in algorithm 2. By way of a store, it stays
        until the upload is committed.
        """
        source, everywhere = leaving.source[job], np.arange(self.topology.nodes)
        sender = source if self.stores is None else self.stores[source]
        last_s = self.topology.migration_s(sender, everywhere, leaving.checkpoint_bytes[job], leaving.restart_s[job])
        if self.stores is None:
            return last_s, last_s
        upload_s = leaving.upload_bytes[job] / self.topology.bandwidth_bytes_s(source, sender)
        return upload_s + last_s, np.broadcast_to(upload_s + leaving.commit_s[job], last_s.shape)


def scores_s(
    network: Network, leaving: Leaving, job: int, candidates: Bools, migration_s: Floats, survival: Floats, rules: Rules
) -> Floats:
    """Returns the score of each node for a job (equation 11): T_mig(d) + alpha (1 - S_d(T_rem)) T_mig_mean(d).

    `migration_s` is T_mig to each node, and `survival` S_d(T_rem) of each node.
    """
    next_s = network.next_s(candidates, leaving.checkpoint_bytes[job], leaving.restart_s[job])
    return migration_s + rules.alpha * (1 - survival) * next_s
