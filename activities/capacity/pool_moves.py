"""Carries out plans of pools: drains machines where that is necessary, then changes their pool.

A machine that is to move is cordoned, and the workloads leave that its new pool does not serve, with the usual notice.
Its pool changes when none of them is left. All state is in the machine's row, and each step is one transaction: a
process that is killed between two steps loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from domain.reasons import Reason, ReasonCode
from infra.db import drains, events, outbox
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.models import Allocation, Machine, Workload

_BY = "mizzen"


@dataclass(frozen=True)
class MoveProgress:
    """What is left of a plan's moves."""

    moving: int
    """Number of machines that move now."""
    waiting: int
    """Number of moves that are due and not begun: as many as allowed are under way, or the machine may not move yet."""
    void: int
    """Number of moves whose machine is gone or in another pool."""


def carry_out(
    session: Session, region: str, moves: Sequence[Mapping[str, Any]], at_most: int, patience_s: float
) -> MoveProgress:
    """Ends moves of machines that are empty, and begins moves of a plan, until `at_most` machines move.

    `patience_s`: a machine that was moved more recently stays.
    """
    tenants = {
        row.name: frozenset(row.tenants)
        for row in session.scalars(select(PoolRow).where(PoolRow.region == region, PoolRow.gpus != {}))
    }
    moving = [
        row for row in _locked(session, region, Machine.next_pool.is_not(None)) if _goes_on(session, row, tenants)
    ]
    left = [move for move in moves if move["target"] in tenants or not move["target"]]
    found = {row.id: row for row in _locked(session, region, Machine.id.in_([move["machine"] for move in left]))}
    waiting = void = 0
    begun = len(moving)
    for move in left:
        row = found.get(move["machine"])
        if row is None or row.pool not in (move["source"], move["target"]):
            void += 1
        elif row.pool != move["target"] and row.next_pool is None:
            if begun < at_most and _may_move(session, row, patience_s):
                begun += 1
                moving += [row] if _begin(session, row, move["target"], tenants) else []
            else:
                waiting += 1
    return MoveProgress(len(moving), waiting, void)


def release_unplanned(session: Session) -> int:
    """Takes machines out of pools that have no intended size any more, and for which they were not launched.

    Such machines may be used by all tenants again. Moves to such pools end. Returns the number of machines.
    """
    sized = select(PoolRow.name).where(PoolRow.region == Machine.region, PoolRow.gpus != {})
    launched = select(InstanceRow.id).where(
        InstanceRow.machine == Machine.id, InstanceRow.gone_at.is_(None), InstanceRow.pool == Machine.pool
    )
    left = Machine.pool != "", Machine.pool.not_in(sized), ~launched.exists()
    gone = session.execute(update(Machine).where(*left).values(pool="", pool_since=func.now()).returning(Machine.id))
    stopped = update(Machine).where(Machine.next_pool.is_not(None), Machine.next_pool.not_in(sized))
    moves = Machine.cordon["code"].as_string() == ReasonCode.MOVES_POOL.value
    session.execute(stopped.where(moves).values(cordon=Machine.notice))
    if count := len(gone.all()) + len(session.execute(stopped.values(next_pool=None).returning(Machine.id)).all()):
        outbox.wake_scheduler(session)
    return count


def _locked(session: Session, region: str, which: Any) -> Sequence[Machine]:
    rows = select(Machine).where(Machine.region == region, which).order_by(Machine.id).with_for_update()
    return session.scalars(rows.execution_options(populate_existing=True)).all()


def _may_move(session: Session, row: Machine, patience_s: float) -> bool:
    since = session.scalar(select(func.extract("epoch", func.now() - Machine.pool_since)).where(Machine.id == row.id))
    rested = since is None or float(since) >= patience_s
    return rested and row.state == "ready" and row.cordon is None and not row.draining


def _begin(session: Session, row: Machine, target: str, tenants: Mapping[str, frozenset[str]]) -> bool:
    """Begins to move a machine, or moves it if nothing must leave it; returns whether it moves now."""
    serves = tenants.get(target, frozenset())
    if not _unserved(session, row, serves):
        _end(session, row, target)
        return False
    reason = Reason(ReasonCode.MOVES_POOL, {"pool": target})
    row.next_pool, row.cordon = target, reason.to_json()
    drains.send_away(session, row, _BY, but=serves, pool=target)
    events.record(session, "machine.moving", region=row.region, machine=row.id, reason=reason)
    outbox.wake_scheduler(session)
    return True


def _goes_on(session: Session, row: Machine, tenants: Mapping[str, frozenset[str]]) -> bool:
    """Continues the move of a machine; returns whether it still moves. An operator who uncordons it ends the move."""
    target = row.next_pool
    assert target is not None
    if row.cordon is None:
        row.next_pool, row.pool_since = None, func.now()
        return False
    if _unserved(session, row, tenants.get(target, frozenset())):
        return True
    _end(session, row, target)
    return False


def _end(session: Session, row: Machine, target: str) -> None:
    detail = {"from": row.pool, "to": target}
    row.pool, row.next_pool, row.pool_since = target, None, func.now()
    if row.cordon is not None and row.cordon.get("code") == ReasonCode.MOVES_POOL:
        row.cordon = row.notice  # A notice that came meanwhile.
    events.record(session, "machine.moved", region=row.region, machine=row.id, detail=detail)
    outbox.wake_scheduler(session)


def _unserved(session: Session, row: Machine, serves: frozenset[str]) -> bool:
    """Returns whether workloads of tenants that are not in `serves` hold something there; empty: it has all tenants."""
    if not serves:
        return False
    held = select(Allocation.workload).join(Workload, Workload.id == Allocation.workload)
    left = held.where(Allocation.machine == row.id, Allocation.released_at.is_(None), Workload.tenant.not_in(serves))
    return session.scalar(left.limit(1)) is not None
