"""The plan of one placement run: new homes, replicas, and the moves in the order in which they are executed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from domain.ids import split_read
from domain.instance import Homes
from tetris.climb import Listener, climb
from tetris.columns import Columns, Ints
from tetris.explain import explain
from tetris.pieces import RequiredPieces
from tetris.replicas import ReplicaPolicy, Replicated, WantedReplica, jobs_without_region, replicas_document, replicate
from tetris.report import Summary, summarise

_UNPLACED_TOLD = 1000
"""Maximum number of unplaced jobs that a plan lists."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One move: data of a table is copied to a region, or a region becomes its home."""

    kind: Literal["home", "replica"]
    """`home`: the target becomes the home. The copy at the old home is dropped unless it is kept as a replica."""
    table: str
    source: str
    target: str
    size_bytes: float
    """Bytes to copy; 0 if the target of a home move has a replica of the whole table."""
    partitions: tuple[str, ...] | None
    """Partitions of a partial replica; None for the whole table."""
    why: dict[str, Any]
    """For a home move its changes (`tetris.explain.Move`), for a replica its `reason` and `job`."""


@dataclass(frozen=True, slots=True)
class PlacementRunPlan:
    """The result of planning one placement run."""

    homes: Homes
    moves: tuple[PlannedMove, ...]
    """Home moves, largest gain first (each after the earlier moves), then replicas, most important first."""
    replicas: dict[str, Any]
    """Document of all wanted replicas, including those that exist already."""
    summary: Summary
    unplaced: tuple[dict[str, Any], ...]
    """The first `_UNPLACED_TOLD` jobs that no region can run, with the reasons."""
    unplaced_jobs: int
    """Number of all jobs that no region can run."""


def plan_placement_run(
    columns: Columns,
    policy: ReplicaPolicy,
    *,
    time_s: float,
    seed: int,
    needed: RequiredPieces | None = None,
    stay: npt.NDArray[np.bool_] | None = None,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> PlacementRunPlan:
    """Plans homes (MAST 3.4), then replicas (3.5), and orders the moves.

    `needed` has the partitions that jobs read if they do not read whole tables. `stay` is a mask of the entries of
    `columns.replica` that may not be dropped (None: all). Only these replicas and the homes count as stored bytes: a
    replica that the placement run may drop must not influence the homes. The search for homes ends when
    `stop` returns true.

    The instance's quota of moved bytes applies to the home moves only. The caller applies the rest of it to replicas.
    """
    kept = columns if stay is None else columns.keeping(stay)
    home = climb(kept, time_s=time_s, seed=seed, listener=listener, stop=stop).home
    needed = RequiredPieces.of(columns) if needed is None else needed
    found = replicate(columns, home, policy, needed, stay)
    return PlacementRunPlan(
        homes=columns.plan_of(home),
        moves=(*_homes(columns, home), *_replicas(columns, home, found, needed)),
        replicas=replicas_document(columns, found, needed),
        summary=summarise(columns, home),
        unplaced=tuple(
            {**asdict(u), "job": columns.job_names[u.job], "level": int(columns.priority[u.job])}
            for u in found.unplaced[:_UNPLACED_TOLD]
        ),
        unplaced_jobs=len(jobs_without_region(columns, found.pieces, needed)),
    )


def _homes(columns: Columns, home: Ints) -> list[PlannedMove]:
    out = []
    for move in explain(columns, home):
        why = asdict(move)
        table, source, target = (why.pop(name) for name in ("table", "source", "target"))
        out.append(PlannedMove("home", table, source, target, why.pop("copied_bytes"), None, why))
    return out


def _replicas(columns: Columns, home: Ints, found: Replicated, needed: RequiredPieces) -> list[PlannedMove]:
    """Returns the moves for missing replicas, one per table and region. A copy at the old home is not missing."""
    together: dict[tuple[int, int], list[WantedReplica]] = {}
    for replica in found.replicas:
        together.setdefault((replica.table, replica.region), []).append(replica)
    out = []
    for (table, region), replicas in together.items():
        there = columns.replica[columns.replica_start[table] : columns.replica_start[table + 1]]
        if region == columns.home[table] or np.any(there == region):
            continue
        first = replicas[0]
        why: dict[str, Any] = {"reason": first.reason}
        if first.job >= 0:
            why["job"] = columns.job_names[first.job]
        size, partitions = float(columns.size_bytes[table]), None
        if all(r.edge >= 0 for r in replicas):
            pieces = sorted({int(piece) for r in replicas for piece in needed.pieces(r.edge)})
            size = float(needed.size_bytes[pieces].sum())
            partitions = tuple(sorted({str(split_read(n)[1]) for r in replicas for n in needed.names(r.edge)}))
        way = columns.table_names[table], columns.regions[int(home[table])], columns.regions[region]
        out.append(PlannedMove("replica", *way, size, partitions, why))
    return out
