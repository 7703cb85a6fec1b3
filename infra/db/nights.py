"""What nights of the placement of tables decided, moved and left (MAST 3.4, 3.5), and whether moves are paused."""

from collections.abc import Collection
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, func, select, text
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Mapped, Session, mapped_column

from infra.config import NightlySettings
from infra.db.base import NOW, Base, Json


class Night(Base):
    """One run of the slow path. At most one is open."""

    __tablename__ = "night"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Of its workflow."""
    dry_run: Mapped[bool]
    """It is planned, and nothing moves."""
    state: Mapped[str] = mapped_column(
        CheckConstraint("state in ('planning', 'moving', 'ended', 'failed')", name="night_state")
    )
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    planned_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime]
    """No move begins after it; those that have begun are finished."""
    ended_at: Mapped[datetime | None]
    artifact_url: Mapped[str | None]
    """The folder of its instance, plan, replicas and moves."""
    report: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """`tetris.report.Summary` as `summary`, and the jobs that no region can run as `unplaced`."""
    problem: Mapped[str | None]
    """Why it failed."""
    __table_args__ = (
        Index("night_open", text("(true)"), unique=True, postgresql_where=text("state in ('planning', 'moving')")),
        Index("night_started", "started_at"),
    )


class NightMove(Base):
    """One move of a night, in the order in which they begin."""

    __tablename__ = "night_move"
    night: Mapped[str] = mapped_column(ForeignKey("night.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(
        CheckConstraint("kind in ('home', 'replica', 'refresh', 'drop')", name="night_move_kind")
    )
    data_table: Mapped[str]
    source_region: Mapped[str]
    target_region: Mapped[str]
    size_bytes: Mapped[int]
    """What is to be copied, as planned."""
    partitions: Mapped[list[str] | None]
    """Of a replica of some partitions only: which; None: it is of the whole table."""
    keeps_source: Mapped[bool] = mapped_column(server_default=text("false"))
    """Of a home: the old home's copy stays as a replica."""
    why: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    state: Mapped[str] = mapped_column(
        CheckConstraint("state in ('waiting', 'copying', 'done', 'left')", name="night_move_state"),
        server_default="waiting",
    )
    lane: Mapped[int | None]
    """Which of those that move at once has it: one that asks again, after a crash, gets the same move."""
    left_because: Mapped[str | None]
    """Of one that was left: why, in a sentence."""
    begun_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("night", "kind", "data_table", "target_region"),
        Index("night_move_begun", "begun_at"),
        Index("night_move_open", "night", "number", postgresql_where=text("state in ('waiting', 'copying')")),
    )


class NightPause(Base):
    """There is a row while nightly moves are paused."""

    __tablename__ = "night_pause"
    one: Mapped[bool] = mapped_column(
        CheckConstraint("one"), primary_key=True, server_default=text("true"), autoincrement=False
    )
    since: Mapped[datetime] = mapped_column(server_default=NOW)
    by: Mapped[str]
    """The id of an API key."""
    note: Mapped[str] = mapped_column(server_default="")


OPEN = ("planning", "moving")
"""States of a night that is not over."""


def begin_night(session: Session, night: str, deadline_s: float, *, dry_run: bool) -> Night | None:
    """Writes a new night down, after whose start moves begin for `deadline_s`; None: there is one that is not over."""
    statement = (
        insert(Night)
        .values(
            id=night, dry_run=dry_run, state="planning", deadline_at=func.now() + timedelta(seconds=deadline_s)
        )
        .on_conflict_do_nothing()
        .returning(Night)
    )  # fmt: skip
    return session.scalars(statement).one_or_none()


def open_night(session: Session) -> Night | None:
    """The night that is not over."""
    return session.scalars(select(Night).where(Night.state.in_(OPEN))).one_or_none()


def home_move_began(session: Session, table: str, region: str) -> datetime | None:
    """When the move of a table's home to a region began that is under way; None: there is none."""
    own = NightMove.data_table == table, NightMove.target_region == region
    moving = NightMove.kind == "home", NightMove.state == "copying", Night.state == "moving"
    statement = select(NightMove.begun_at).join(Night, Night.id == NightMove.night).where(*own, *moving)
    return session.scalars(statement.order_by(NightMove.begun_at.desc()).limit(1)).one_or_none()


def quota_left_bytes(session: Session, nightly: NightlySettings) -> float | None:
    """What may still be moved today, by the day of the schedule's time zone; None: there is no limit."""
    quota = nightly.daily_quota_bytes
    if quota is None:
        return None
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    midnight = now.astimezone(ZoneInfo(nightly.time_zone)).replace(hour=0, minute=0, second=0, microsecond=0)
    moved = select(func.coalesce(func.sum(NightMove.size_bytes), 0)).where(NightMove.begun_at >= midnight)
    return max(quota - float(session.execute(moved).scalar_one()), 0.0)


def moves_by_state(session: Session, nights: Collection[str]) -> dict[str, dict[str, tuple[int, int]]]:
    """For each of `nights`, state of moves to how many there are and their planned bytes."""
    out: dict[str, dict[str, tuple[int, int]]] = {night: {} for night in nights}
    counted = (
        select(NightMove.night, NightMove.state, func.count(), func.sum(NightMove.size_bytes))
        .where(NightMove.night.in_(sorted(out)))
        .group_by(NightMove.night, NightMove.state)
    )
    for night, state, count, size_bytes in session.execute(counted):
        out[night][state] = int(count), int(size_bytes)
    return out
