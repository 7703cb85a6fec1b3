"""One night's plan: new homes, the replicas that they call for, and the moves in the order in which they are made."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from domain.ids import split_read
from domain.instance import Homes
from tetris.climb import Listener, climb
from tetris.columns import Columns, Ints
from tetris.explain import explain
from tetris.needed import Needed
from tetris.replicas import Policy, Replica, Replicated, jobs_without_region, replicas_document, replicate
from tetris.report import Summary, summarise

_UNPLACED_TOLD = 1000


@dataclass(frozen=True, slots=True)
class NightMove:
    """One thing to do: the data of a table comes to a region."""

    kind: Literal["home", "replica"]
    """`home`: the region becomes the table's home, and the old home's copy goes unless it is kept as a replica."""
    table: str
    source: str
    target: str
    size_bytes: float
    """What is to be copied: 0 where the target has a replica of the whole table."""
    partitions: tuple[str, ...] | None
    """Of a replica of some partitions only: which."""
    why: dict[str, Any]
    """Of a home, what the move changes (`tetris.explain`); of a replica, its `reason` and `job`."""


@dataclass(frozen=True, slots=True)
class NightPlan:
    """What a night is to do."""

    homes: Homes
    moves: tuple[NightMove, ...]
    """New homes by what they gain, each after those before it; then replicas, the ones that matter most first."""
    replicas: dict[str, Any]
    """All that should be, as a document, those that are there among them."""
    summary: Summary
    unplaced: tuple[dict[str, Any], ...]
    """Jobs that no region can run, with why, the first of them."""
    unplaced_jobs: int


def plan_night(
    columns: Columns,
    policy: Policy,
    *,
    time_s: float,
    seed: int,
    needed: Needed | None = None,
    stay: npt.NDArray[np.bool_] | None = None,
    listener: Listener | None = None,
    ends_s: float | None = None,
) -> NightPlan:
    """Decides on homes (MAST 3.4), then on replicas (3.5), and puts what is to be copied in order.

    `needed`: the partitions that jobs read, where they do not read whole tables. `stay`: which entries of
    `columns.replica` no night drops (None: all). Only those take storage beside the homes: a replica that the night may
    drop is no reason to move its table's home into a full region. `ends_s`: when the search for homes is to end at the
    latest, on `time.monotonic()`.

    The instance's quota of moved bytes is for the homes: who makes replicas looks at what is left of it.
    """
    kept = columns if stay is None else columns.keeping(stay)
    home = climb(kept, time_s=time_s, seed=seed, listener=listener, ends_s=ends_s).home
    needed = Needed.of(columns) if needed is None else needed
    found = replicate(columns, home, policy, needed, stay)
    return NightPlan(
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


def _homes(columns: Columns, home: Ints) -> list[NightMove]:
    out = []
    for move in explain(columns, home):
        why = asdict(move)
        table, source, target = (why.pop(name) for name in ("table", "source", "target"))
        out.append(NightMove("home", table, source, target, why.pop("copied_bytes"), None, why))
    return out


def _replicas(columns: Columns, home: Ints, found: Replicated, needed: Needed) -> list[NightMove]:
    """Those that are not there yet, one for each table and region. An old home that is to be a replica is there."""
    together: dict[tuple[int, int], list[Replica]] = {}
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
        out.append(NightMove("replica", *way, size, partitions, why))
    return out
