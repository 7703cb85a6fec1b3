"""Nightly runs of Tetris: their plans, their moves of tables (MAST 3.4, 3.5), and the pause of moves."""

from collections.abc import Collection
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, func, select, text
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from infra.config.data import NightlySettings
from infra.db.base import NOW, Base, Json


class PlacementRun(Base):
    """One nightly run of Tetris. At most one is open."""

    __tablename__ = "placement_run"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Id of the run's workflow."""
    dry_run: Mapped[bool]
    """Whether the run only makes a plan and moves nothing."""
    state: Mapped[str] = mapped_column(
        CheckConstraint("state in ('planning', 'moving', 'ended', 'failed')", name="placement_run_state")
    )
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    planned_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime]
    """No move starts after this time. Moves that have started are finished."""
    ended_at: Mapped[datetime | None]
    artifact_url: Mapped[str | None]
    """URL of the folder with the run's instance, plan, replicas and moves."""
    report: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """JSON with `summary` (a `tetris.report.Summary`) and `unplaced`, the jobs that no region can run."""
    problem: Mapped[str | None]
    """Why the run failed."""
    __table_args__ = (
        Index(
            "placement_run_open", text("(true)"), unique=True, postgresql_where=text("state in ('planning', 'moving')")
        ),
        Index("placement_run_started", "started_at"),
    )


class PlacementMove(Base):
    """One move of a nightly run. Moves start in the order of `number`."""

    __tablename__ = "placement_move"
    placement_run: Mapped[str] = mapped_column(ForeignKey("placement_run.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(
        CheckConstraint("kind in ('home', 'replica', 'refresh', 'drop')", name="placement_move_kind")
    )
    data_table: Mapped[str]
    source_region: Mapped[str]
    target_region: Mapped[str]
    size_bytes: Mapped[int]
    """Planned number of bytes to copy."""
    partitions: Mapped[list[str] | None]
    """The partitions of a partial replica; None for the whole table."""
    keeps_source: Mapped[bool] = mapped_column(server_default=text("false"))
    """For a move of a home: whether the copy in the old home stays as a replica."""
    why: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    state: Mapped[str] = mapped_column(
        CheckConstraint("state in ('waiting', 'copying', 'done', 'left')", name="placement_move_state"),
        server_default="waiting",
    )
    lane: Mapped[int | None]
    """Number of the concurrent mover that executes the move. After a crash the mover gets the same move again."""
    left_because: Mapped[str | None]
    """Why the move was skipped (state `left`), as a sentence."""
    begun_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("placement_run", "kind", "data_table", "target_region"),
        Index("placement_move_begun", "begun_at"),
        Index(
            "placement_move_open", "placement_run", "number", postgresql_where=text("state in ('waiting', 'copying')")
        ),
    )


class PlacementPause(Base):
    """The pause of nightly moves. The table has one row while they are paused, else none."""

    __tablename__ = "placement_pause"
    one: Mapped[bool] = mapped_column(
        CheckConstraint("one"), primary_key=True, server_default=text("true"), autoincrement=False
    )
    since: Mapped[datetime] = mapped_column(server_default=NOW)
    by: Mapped[str]
    """Id of the API key that requested the pause."""
    note: Mapped[str] = mapped_column(server_default="")


OPEN = ("planning", "moving")
"""States of an open nightly run."""


def begin_placement_run(
    session: Session, placement_run: str, deadline_s: float, *, dry_run: bool
) -> PlacementRun | None:
    """Creates a nightly run whose moves may start for `deadline_s` from now. Returns None if another one is open."""
    statement = (
        insert(PlacementRun)
        .values(
            id=placement_run, dry_run=dry_run, state="planning", deadline_at=func.now() + timedelta(seconds=deadline_s)
        )
        .on_conflict_do_nothing()
        .returning(PlacementRun)
    )  # fmt: skip
    return session.scalars(statement).one_or_none()


def open_placement_run(session: Session) -> PlacementRun | None:
    """Returns the open nightly run, or None."""
    return session.scalars(select(PlacementRun).where(PlacementRun.state.in_(OPEN))).one_or_none()


def home_move_began(session: Session, table: str, region: str) -> datetime | None:
    """Returns when the running move of a table's home to `region` began, or None if no such move is running."""
    own = PlacementMove.data_table == table, PlacementMove.target_region == region
    moving = PlacementMove.kind == "home", PlacementMove.state == "copying", PlacementRun.state == "moving"
    statement = (
        select(PlacementMove.begun_at)
        .join(PlacementRun, PlacementRun.id == PlacementMove.placement_run)
        .where(*own, *moving)
    )
    return session.scalars(statement.order_by(PlacementMove.begun_at.desc()).limit(1)).one_or_none()


def quota_left_bytes(session: Session, nightly: NightlySettings) -> float | None:
    """Returns how many bytes may still be moved today (in the schedule's time zone), or None without a quota."""
    quota = nightly.daily_quota_bytes
    if quota is None:
        return None
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    midnight = now.astimezone(ZoneInfo(nightly.time_zone)).replace(hour=0, minute=0, second=0, microsecond=0)
    moved = select(func.coalesce(func.sum(PlacementMove.size_bytes), 0)).where(PlacementMove.begun_at >= midnight)
    return max(quota - float(session.execute(moved).scalar_one()), 0.0)


def moves_by_state(session: Session, placement_runs: Collection[str]) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns for each nightly run the number and the planned bytes of its moves, by state."""
    out: dict[str, dict[str, tuple[int, int]]] = {placement_run: {} for placement_run in placement_runs}
    counted = (
        select(PlacementMove.placement_run, PlacementMove.state, func.count(), func.sum(PlacementMove.size_bytes))
        .where(PlacementMove.placement_run.in_(sorted(out)))
        .group_by(PlacementMove.placement_run, PlacementMove.state)
    )
    for placement_run, state, count, size_bytes in session.execute(counted):
        out[placement_run][state] = int(count), int(size_bytes)
    return out
