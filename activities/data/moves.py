"""The moves of a placement run: selects and begins the next move, and switches a table's home when its copy is
complete.
"""

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio import activity

from activities.data.placement_moves import give_up
from domain.placement_runs import MoveOrder, MoveRef, NextMove
from domain.protocol.activities import Activity
from infra.config.settings import Settings
from infra.db import events, integrity, outbox
from infra.db.catalogue import StorageFull, drop_replica, lacking, no_room, want_partitions, want_replica
from infra.db.models import Region
from infra.db.placement_runs import PlacementMove, PlacementPause, PlacementRun
from infra.db.session import transaction
from infra.db.tables import Replica, Table


class MoveActivities:
    """The activities of a placement run's workflow that begin and finish moves."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._nightly = settings.tetris.nightly

    @activity.defn(name=Activity.NEXT_MOVE.value)
    def next_move(self, ask: NextMove) -> MoveOrder:
        """Begins the first waiting move that is possible. Impossible moves before it are left out, with the reason.

        A lane that has not finished its move gets the same move again.
        """
        with transaction(self._engine) as session:
            # The lock serializes the lanes of a placement run.
            placement_run = session.get(PlacementRun, ask.placement_run, with_for_update=True)
            if placement_run is None or placement_run.state != "moving" or placement_run.dry_run:
                return MoveOrder(over=True)
            own = PlacementMove.placement_run == ask.placement_run
            mine = session.scalars(
                select(PlacementMove).where(own, PlacementMove.lane == ask.lane, _COPYING)
            ).one_or_none()
            if session.get(PlacementPause, True) is not None:
                return MoveOrder(paused=True)
            if mine is not None:
                return _order(mine)
            if session.execute(select(func.clock_timestamp() > placement_run.deadline_at)).scalar_one():
                return MoveOrder(over=True)
            waiting = (
                select(PlacementMove)
                .where(own, PlacementMove.state == "waiting")
                .order_by(PlacementMove.number)
                .limit(1)
            )
            while (move := session.scalars(waiting).one_or_none()) is not None:
                if self._begun(session, move):
                    move.lane = ask.lane
                    return _order(move)
                session.flush()
            return MoveOrder(over=True)

    @activity.defn(name=Activity.FINISH_MOVE.value)
    def finish_move(self, ref: MoveRef) -> bool:
        """Finishes a move whose copy has ended. For a move of the home, one transaction switches the home and drops the
        old copy after its grace.

        Returns False if the copy must be completed first: the table was appended to meanwhile, or not all of the copy
        has been verified since the move began.
        """
        with transaction(self._engine) as session:
            move = session.get(PlacementMove, (ref.placement_run, ref.number), with_for_update=True)
            if move is None or move.state != "copying":
                return True
            table = session.get(Table, move.data_table, with_for_update=True)
            copy = session.get(Replica, (move.data_table, move.target_region), with_for_update=True)
            problem = ref.problem
            if problem is None and (table is None or copy is None or copy.state == "deleting"):
                problem = "the table or its replica was deleted meanwhile"
            if problem is not None or table is None or copy is None:
                _leave(move, problem or "")
                if copy is not None:
                    give_up(session, copy, move.placement_run, self._nightly.grace_s)
                return True
            if copy.state != "ready" or copy.wrong_since is not None:
                return False
            if move.kind != "replica" and copy.stale_since is not None:
                return False
            if move.kind == "home" and not _verified(session, move):
                return False
            if move.partitions is not None and lacking(session, table.name, copy.region, limit=1):
                return False
            if move.kind == "home" and not self._switched(session, move, table):
                return True
            _done(move)
            return True

    def _begun(self, session: Session, move: PlacementMove) -> bool:
        """Begins a move; returns whether it is to be copied now. Otherwise the move is done or left out."""
        target = session.get(Region, move.target_region, with_for_update={"key_share": True})
        table = session.get(Table, move.data_table, with_for_update=True)
        if table is None or target is None:
            return _leave(move, f"the {'table' if table is None else 'region'} does not exist any more")
        if move.kind == "home" and table.home_region != move.source_region:
            return _leave(move, f"the table's home is now {table.home_region}")
        there = session.get(Replica, (move.data_table, move.target_region), with_for_update=True)
        if move.kind == "drop":
            return self._dropped(session, move, table, there)
        if move.kind == "refresh" and (there is None or there.state != "ready"):
            return _leave(move, "the replica to refresh does not exist any more")
        if there is None:
            more_bytes = table.size_bytes if move.partitions is None else move.size_bytes
            if (full := no_room(session, target.name, more_bytes)) is not None:
                return _leave(move, str(full))
        where = move.data_table, move.target_region
        try:
            if move.partitions is None:
                copy = want_replica(session, *where, fresh=True, placement_run=move.placement_run)
            else:
                copy = want_partitions(session, *where, move.partitions, move.placement_run)
        except StorageFull as full:
            return _leave(move, str(full))
        if copy is None or copy.state == "deleting":
            return _leave(move, f"the table's objects in {move.target_region} are being deleted")
        move.state, move.begun_at = "copying", func.clock_timestamp()
        session.flush()
        return True

    def _dropped(self, session: Session, move: PlacementMove, table: Table, there: Replica | None) -> bool:
        if there is None or there.state != "ready" or table.home_region == move.target_region:
            return _leave(move, "the replica to drop does not exist any more")
        if (wrong := integrity.wrong_region(session, table.name)) is not None:
            return _leave(move, f"the copy in {wrong} was found wrong; no replica is dropped until it is repaired")
        drop_replica(session, table.name, there.region, grace_s=self._nightly.grace_s, placement_run=move.placement_run)
        move.begun_at = func.clock_timestamp()
        return _done(move)

    def _switched(self, session: Session, move: PlacementMove, table: Table) -> bool:
        if table.home_region != move.source_region:
            return _leave(move, f"the table's home is now {table.home_region}")
        table.home_region = move.target_region
        session.flush()
        old = session.get(Replica, (table.name, move.source_region), with_for_update=True)
        if old is not None and move.keeps_source and old.state == "ready":
            old.made_by = "placement_run"
        else:
            drop_replica(
                session, table.name, move.source_region, grace_s=self._nightly.grace_s, placement_run=move.placement_run
            )
        detail = {"table": table.name, "source": move.source_region, "placement_run": move.placement_run}
        events.record(session, "table.moved", region=move.target_region, detail=detail)
        outbox.wake_scheduler(session)
        return True


def _verified(session: Session, move: PlacementMove) -> bool:
    """Returns whether the whole copy at the target was read and found right after the move began."""
    since = move.begun_at or integrity.clock(session)
    return not integrity.unverified(session, move.data_table, move.target_region, since=since)


_COPYING = PlacementMove.state == "copying"


def _order(move: PlacementMove) -> MoveOrder:
    return MoveOrder(
        number=move.number, table=move.data_table, source_region=move.source_region, target_region=move.target_region
    )


def _leave(move: PlacementMove, because: str) -> bool:
    move.state, move.left_because, move.ended_at = "left", because, func.clock_timestamp()
    return False


def _done(move: PlacementMove) -> bool:
    move.state, move.ended_at = "done", func.clock_timestamp()
    return False
