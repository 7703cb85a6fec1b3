"""The moves of a placement run: the differences between its plan and the current replicas, within the daily quota of
bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session

from infra.db.catalogue import drop_replica
from infra.db.placement_runs import PlacementMove
from infra.db.tables import Partition, Replica, ReplicaPartition, Table

_GIVEN_UP_S = 60.0
_OVER_QUOTA = "the daily quota of moved bytes is used up"


def moves_of(session: Session, folder: Path, quota_bytes: float | None) -> Iterator[dict[str, Any]]:
    """Yields rows of `PlacementMove` without placement run and number, in the order in which the moves begin.

    First, unwanted replicas are dropped. Then tables move to their new homes, stale replicas are refreshed, and new
    replicas are made. Moves beyond the quota are left out: each of the other moves is an improvement without them.
    """
    replicas = json.loads((folder / "replicas.json").read_text())["replicas"]
    wanted = {(r["table"], r["region"]) for r in replicas}
    planned = list(_planned(folder))
    coming = {(m["table"], m["target"]) for m in planned}
    yield from _drops(session, wanted | coming)
    left = float("inf") if quota_bytes is None else quota_bytes
    for kind, moves in (
        ("home", [m for m in planned if m["kind"] == "home"]),
        ("refresh", _refreshes(session, wanted, coming)),
        ("replica", [m for m in planned if m["kind"] == "replica"]),
    ):
        for move in moves:
            size = int(move["size_bytes"])
            fits = size <= left
            left -= size if fits else 0
            yield {
                "kind": kind, "data_table": move["table"], "source_region": move["source"],
                "target_region": move["target"], "size_bytes": size, "partitions": move.get("partitions"),
                "why": move["why"],
                "keeps_source": kind == "home" and (move["table"], move["source"]) in wanted,
                "state": "waiting" if fits else "left", "left_because": None if fits else _OVER_QUOTA,
            }  # fmt: skip


def tidy(session: Session, placement_run: str, grace_s: float) -> None:
    """Drops incomplete copies that earlier placement runs began and this placement run does not continue."""
    goes_on = exists().where(
        PlacementMove.placement_run == placement_run,
        PlacementMove.state == "waiting",
        PlacementMove.data_table == Replica.data_table,
        PlacementMove.target_region == Replica.region,
    )
    for copy in session.scalars(select(Replica).where(Replica.state == "copying", ~goes_on)):
        give_up(session, copy, placement_run, grace_s)


def give_up(session: Session, copy: Replica, placement_run: str, grace_s: float) -> None:
    """Drops an incomplete copy of a placement run that no workload requested.

    A short grace remains, in which a copy activity that still runs finds out that the replica is being deleted.
    """
    if copy.state == "copying" and copy.made_by == "placement_run" and copy.requested_by is None:
        drop_replica(
            session, copy.data_table, copy.region, grace_s=min(grace_s, _GIVEN_UP_S), placement_run=placement_run
        )


def _planned(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / "moves.jsonl").open() as lines:
        for line in lines:
            yield json.loads(line)


def droppable_replicas(session: Session) -> Iterator[tuple[str, str]]:
    """Yields table and region of the replicas that a placement run may drop: made by a placement run or a workload, not
    an operator.
    """
    for table, region, _ in session.execute(_DROPPABLE):
        yield table, region


_DROPPABLE = (
    select(Replica.data_table, Replica.region, Table.home_region)
    .join(Table, and_(Table.name == Replica.data_table, Table.home_region != Replica.region))
    .where(Replica.state == "ready", Replica.made_by != "operator")
    .order_by(Replica.data_table, Replica.region)
)


def _drops(session: Session, wanted: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yields moves that drop the droppable replicas that are not in `wanted`."""
    for table, region, home in session.execute(_DROPPABLE):
        if (table, region) not in wanted:
            yield {
                "kind": "drop", "data_table": table, "source_region": home, "target_region": region, "size_bytes": 0,
                "partitions": None, "why": {}, "keeps_source": False, "state": "waiting", "left_because": None,
            }  # fmt: skip


def _refreshes(session: Session, wanted: set[tuple[str, str]], coming: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """Returns moves that refresh stale replicas of whole tables, the stalest first.

    Replicas that another move of the placement run copies or drops are left out.
    """
    held = ReplicaPartition.data_table == Partition.data_table, ReplicaPartition.partition == Partition.name
    statement = (
        select(Replica.data_table, Replica.region, Table.home_region, Replica.made_by, func.sum(Partition.size_bytes))
        .join(Table, and_(Table.name == Replica.data_table, Table.home_region != Replica.region))
        .join(Partition, Partition.data_table == Replica.data_table)
        .outerjoin(ReplicaPartition, and_(*held, ReplicaPartition.region == Replica.region))
        .where(Replica.state == "ready", Replica.stale_since.is_not(None), ReplicaPartition.ready_at.is_(None))
        .group_by(Replica.data_table, Replica.region, Table.home_region)
        .order_by(Replica.stale_since, Replica.data_table, Replica.region)
    )
    return [
        {"table": table, "source": home, "target": region, "size_bytes": size, "why": {}}
        for table, region, home, made_by, size in session.execute(statement)
        if (table, region) not in coming and ((table, region) in wanted or made_by == "operator")
    ]
