"""Installations with tables in two regions, and placement runs with given moves."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from temporalio.testing import ActivityEnvironment

from activities.data.copies import CopyActivities
from activities.data.moves import MoveActivities
from activities.data.placement_runs import PlacementRunActivities
from domain.placement_runs import MoveOrder, MoveRef, NextMove
from domain.protocol.data import ReplicateTable
from infra.config.data import NightlySettings, TetrisSettings
from infra.db.logs import UsageRun
from infra.db.models import Region
from infra.db.placement_runs import PlacementMove, PlacementRun
from infra.db.tables import Partition, Replica, Table
from tests.activities.world import World

PLACEMENT_RUN = "run-1"
DAYS = ("ds=1", "ds=2")


def body(table: str, day: str) -> bytes:
    """Returns the content of a partition's object."""
    return f"{table} {day} ".encode() * 40


class PlacementWorld:
    """An installation whose regions have storage, with the activities of the nightly run."""

    def __init__(self, world: World, **nightly: Any) -> None:
        self.world = world
        settings = TetrisSettings(nightly=NightlySettings(**{"solve_s": 0.0, "grace_s": 3600.0, **nightly}))
        world.settings = world.settings.model_copy(update={"tetris": settings})
        self.placement_runs = PlacementRunActivities(world.engine, world.settings)
        self.moves = MoveActivities(world.engine, world.settings)
        self.copies = CopyActivities(world.engine, world.settings)

    def region(self, name: str, storage_bytes: int = 10**9) -> None:
        """Adds a region with this much storage."""
        self.world.region(name)
        self.world.alter(Region, name, storage_bytes=storage_bytes)

    def table(self, name: str, home: str, *replicas: str, days: tuple[str, ...] = DAYS) -> None:
        """Adds a table with one partition for each day, and writes its objects to the home and the other regions."""
        with self.world.session() as session:
            session.add(Table(name=name, home_region=home))
            session.flush()
            session.add_all(
                Partition(
                    data_table=name, name=d, location=f"tables/{name}/{d}/", size_bytes=len(body(name, d))
                )
                for d in days
            )  # fmt: skip
            session.flush()
            for region in (home, *replicas):
                session.add(Replica(data_table=name, region=region, state="ready", ready_at=func.now()))
                for day in days:
                    self.world.bucket(region).put(f"tables/{name}/{day}/part-0", body(name, day))

    def append(self, name: str, day: str) -> None:
        """Adds one more day to the table at its home."""
        with self.world.session() as session:
            home = session.get_one(Table, name).home_region
            self.world.bucket(home).put(f"tables/{name}/{day}/part-0", body(name, day))
            location = f"tables/{name}/{day}/"
            session.add(Partition(data_table=name, name=day, location=location, size_bytes=len(body(name, day))))

    def usage(self, job: str, *tables: str, gpu_type: str = "a100", hours: float = 10.0, priority: int = 1) -> None:
        """Records a run of a job that ended now."""
        with self.world.session() as session:
            session.add(
                UsageRun(
                    source="ml", run=job, job=job, kind="ml", app="training", priority=priority, tables=list(tables),
                    gpu_hours={gpu_type: hours}, ended_at=func.now(),
                )
            )  # fmt: skip

    def placement_run(
        self, *moves: Mapping[str, Any], deadline_s: float = 3600.0, placement_run: str = PLACEMENT_RUN
    ) -> None:
        """Adds a planned placement run with these moves, in order."""
        with self.world.session() as session:
            deadline = func.now() + timedelta(seconds=deadline_s)
            session.add(PlacementRun(id=placement_run, dry_run=False, state="moving", deadline_at=deadline))
            session.flush()
            for number, move in enumerate(moves, 1):
                session.add(PlacementMove(placement_run=placement_run, number=number, **move))

    def next(self, lane: int = 0, placement_run: str = PLACEMENT_RUN) -> MoveOrder:
        """Returns the next move of a lane."""
        return self.moves.next_move(NextMove(placement_run, lane))

    def copy(self, order: MoveOrder) -> int:
        """Runs the copy of a move; returns the bytes copied."""
        request = ReplicateTable(order.table, order.source_region, order.target_region, "nightly")
        return int(ActivityEnvironment().run(self.copies.copy_table, request))

    def finish(self, order: MoveOrder, problem: str | None = None, placement_run: str = PLACEMENT_RUN) -> bool:
        """Finishes a move; returns whether it is complete."""
        return self.moves.finish_move(MoveRef(placement_run, order.number, problem))

    def states(self, placement_run: str = PLACEMENT_RUN) -> list[str]:
        """Returns the state of each move, with the reason if it was left out."""
        with self.world.session() as session:
            rows = session.scalars(
                select(PlacementMove).where(PlacementMove.placement_run == placement_run).order_by(PlacementMove.number)
            )
            return [row.state if row.left_because is None else f"{row.state}: {row.left_because}" for row in rows]

    def homes(self) -> dict[str, str]:
        """Returns the home region of each table."""
        with self.world.session() as session:
            return {row.name: row.home_region for row in session.scalars(select(Table))}

    def replicas(self, table: str) -> dict[str, str]:
        """Returns the state of the table's replica in each region."""
        with self.world.session() as session:
            rows = session.scalars(select(Replica).where(Replica.data_table == table).order_by(Replica.region))
            return {row.region: row.state for row in rows}

    def delete_at(self, table: str, region: str) -> datetime | None:
        """Returns the time at which a replica's objects will be deleted."""
        with self.world.session() as session:
            return session.get_one(Replica, (table, region)).delete_at


def home(table: str, source: str, target: str, **more: Any) -> dict[str, Any]:
    """Returns a move of a table to a new home."""
    way = {"source_region": source, "target_region": target}
    return {"kind": "home", "data_table": table, **way, "size_bytes": 100, **more}
