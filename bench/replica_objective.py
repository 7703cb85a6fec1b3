"""The common objective of homes and replicas, independent of the method that decided them (MAST 3.3 and 3.5).

total = read * read_weight + gpu * gpu_weight + storage * storage_weight + weights.nowhere * nowhere
+ weights.recovery * recovery + weights.reach * reach. The read and GPU terms are those of the homes (`tetris.problem`).
The storage term covers all copies: the sum over regions of (U[r]/sum U - C[r]/sum C)^2. The terms of replicas are
between 0 (best) and 1:

    nowhere:   fraction, by weight, of the ML jobs for which no region has both all their tables and their hardware
    recovery:  fraction, by bytes, of the tables read by jobs that have no copy outside their home
    reach:     mean over ML jobs on GPUs, by weight, of the fraction of their GPU type's supply in regions without
               their tables
"""

from dataclasses import dataclass

import numpy as np

from tetris.columns import ML, NONE, Columns, Floats, Ints
from tetris.problem import PlacementProblem
from tetris.replicas import Parts, candidate_regions, jobs_without_region


@dataclass(frozen=True, slots=True)
class ReplicaWeights:
    """Weights of the three terms of `ReplicaCost` that measure the purposes of replicas.

    The other terms have no weight here; they are below 1 for a good plan.
    """

    nowhere: float = 10.0
    recovery: float = 1.0
    reach: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """The cost of a plan: its terms, each before it is weighted, and `total`, their weighted sum."""

    read: float
    gpu: float
    storage: float
    nowhere: float
    recovery: float
    reach: float
    total: float
    over_bytes: float
    """Bytes beyond the capacity, summed over regions."""


def worth(columns: Columns, home: Ints, held: Parts, weights: ReplicaWeights = ReplicaWeights()) -> ReplicaCost:
    """Returns the cost of homes [T] with their copies; `held`: [T, R] as in `tetris.replicas.Replicated`."""
    read, gpu, _ = PlacementProblem(columns, home).terms
    stored = held.astype(np.float64).T @ columns.size_bytes
    capacity = columns.capacity_bytes
    storage = float(((_parts(stored) - _parts(capacity)) ** 2).sum())
    ml = columns.kind == ML
    lacking = np.zeros(len(ml), np.bool_)
    lacking[jobs_without_region(columns, held)] = True
    nowhere = _part(columns.weight * ml, lacking)
    outside = held.copy()
    outside[np.arange(len(home)), home] = 0.0
    recovery = _part(columns.size_bytes * is_read(columns), outside.max(axis=1, initial=0.0) < 1.0)
    reach = _part(columns.weight * (ml & (columns.gpu_type != NONE)), out_of_reach(columns, held))
    w = columns.weights
    total = read * w.read + gpu * w.gpu + storage * w.storage
    total += weights.nowhere * nowhere + weights.recovery * recovery + weights.reach * reach
    over = float(np.maximum(stored - capacity, 0.0).sum())
    return ReplicaCost(read, gpu, storage, nowhere, recovery, reach, total, over)


def is_read(columns: Columns) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Returns [T] whether a job reads a table."""
    out = np.zeros(len(columns.size_bytes), np.bool_)
    out[columns.job_table] = True
    return out


def out_of_reach(columns: Columns, held: Parts) -> Floats:
    """Returns [J] the fraction of the GPU type's supply in regions without the job's tables; 0 if it needs no GPUs."""
    out = np.zeros(len(columns.kind))
    mine = columns.gpu_type != NONE
    share = supply_share(columns)[columns.gpu_type[mine]]
    out[mine] = 1.0 - (candidate_regions(columns, held)[mine] * share).sum(axis=1)
    return out


def supply_share(columns: Columns) -> Floats:
    """Returns [G, R] each region's fraction of a GPU type's supply; 0 if the type has no supply."""
    sums = columns.supply_h.sum(axis=1, keepdims=True)
    return np.asarray(columns.supply_h / np.where(sums > 0, sums, 1.0), np.float64)


def _parts(amounts: Floats) -> Floats:
    whole = amounts.sum()
    return np.asarray(amounts / whole if whole else np.zeros_like(amounts), np.float64)


def _part(weights: Floats, of: "np.ndarray[tuple[int], np.dtype[np.float64 | np.bool_]]") -> float:
    whole = float(weights.sum())
    return float((weights * of).sum()) / whole if whole else 0.0
