"""The change log: the rows that have changed since a reader's last read.

Triggers write the log in the transaction of the change, so it contains exactly the committed changes. A reader stores
the Postgres snapshot of its last read, and next reads the changes that are not visible in that snapshot. So each change
is read exactly once, however late its transaction commits. (Unlike followers of the event log, these readers need no
order, because they read the current state of the changed rows.)

Old changes are deleted after some time. A reader must read everything again if it is new, if its position is older than
the kept changes, or if the epoch has changed: a crash of Postgres empties the log and ends its epoch.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from infra.db.session import transaction


class ChangedRow(NamedTuple):
    """One changed row. The kinds are listed in `infra.db.logs.ChangedRow`."""

    kind: str
    key: str
    attempt: int | None


@dataclass(frozen=True)
class Position:
    """A reader's position: in one epoch, all transactions below `xmax` have been read, except those in flight."""

    epoch: str
    xmin: int
    xmax: int
    in_flight: tuple[int, ...]
    forgotten_txid: int
    """Changes of transactions up to this id may have been deleted."""


def position(session: Session) -> tuple[Position | None, float]:
    """Returns the position of the session's snapshot, and the time of the database's clock in epoch seconds.

    The session must be in REPEATABLE READ. The position is None if there is no epoch; call `begin_epoch` then, and
    repeat this in a new transaction.
    """
    row = session.execute(
        text(
            "select epoch, forgotten_txid, pg_current_snapshot()::text, extract(epoch from clock_timestamp())::float8"
            " from (values (1)) as always (row) left join change_epoch on true"
        )
    ).one()
    epoch, forgotten_txid, snapshot, now_s = row
    if epoch is None:
        return None, float(now_s)
    xmin, xmax, listed = snapshot.split(":")
    in_flight = tuple(int(txid) for txid in listed.split(",")) if listed else ()
    return Position(epoch, int(xmin), int(xmax), in_flight, forgotten_txid), float(now_s)


def begin_epoch(engine: Engine) -> None:
    """Begins an epoch if there is none."""
    with transaction(engine) as session:
        session.execute(text("insert into change_epoch default values on conflict do nothing"))


def between(
    session: Session, seen: Position, now: Position, regions: Collection[str] | None = None
) -> set[ChangedRow] | None:
    """Returns the rows that have changed between `seen` and the session's position `now`.

    With `regions`, returns only changes that may affect these regions. Returns None if changes since `seen` were
    deleted or the epoch has changed; the reader must read everything then.
    """
    if seen.epoch != now.epoch or now.forgotten_txid >= seen.xmin or now.xmin < seen.xmin:
        return None
    found = session.execute(
        text(
            "select distinct kind, key, attempt from change"
            # The upper bound does not change the result. It makes the planner expect few rows, even without statistics.
            " where txid >= :xmin and txid < :upto and (txid >= :xmax or txid = any(:in_flight))"
            " and (cast(:regions as text[]) is null or region is null or region = any(:regions))"
        ),
        {
            "xmin": seen.xmin,
            "xmax": seen.xmax,
            "upto": now.xmax,
            "in_flight": list(seen.in_flight),
            "regions": None if regions is None else sorted(regions),
        },
    )
    return {ChangedRow(*row) for row in found}


def forget(session: Session, keep: timedelta) -> None:
    """Deletes changes that are older than `keep`, and stores the newest deleted transaction id in the epoch."""
    session.execute(
        text(
            "with gone as (delete from change where at < now() - :keep returning txid)"
            " update change_epoch set forgotten_txid = greatest(forgotten_txid, (select max(txid) from gone))"
            " where exists (select from gone)"
        ),
        {"keep": keep},
    )
