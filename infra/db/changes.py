"""The change log: which rows have changed since a reader last looked, whoever changed them.

Triggers write it with the change, so it has what was committed and nothing else. A reader keeps the snapshot of the
transaction in which it looked, and reads next what that snapshot did not see: its position is exact, whichever
transactions were in flight and however late they commit. (Followers of the event log also need an order; readers here
take the rows as they are now, so they have none to wait for.)

Changes are kept for a while. A reader that stayed away for longer, or that has none of this epoch's positions (it is
new, or Postgres crashed, which empties the log), reads everything and goes on from there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from infra.db.session import transaction


class Change(NamedTuple):
    """One row that is not as it was; `infra.db.logs.Change` says which kinds there are."""

    kind: str
    key: str
    attempt: int | None


@dataclass(frozen=True)
class Position:
    """What a reader has seen: every transaction below `xmax` but those in flight, in one epoch of the log."""

    epoch: str
    xmin: int
    xmax: int
    in_flight: tuple[int, ...]
    forgotten_txid: int
    """Changes up to this transaction may have been deleted by then."""


def look(session: Session) -> tuple[Position | None, float]:
    """The session's position, which has to be in REPEATABLE READ, and the database's clock in seconds.

    None: there is no epoch. `begin_epoch` begins one, and a later transaction will see it.
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
    """Begins an epoch where there is none."""
    with transaction(engine) as session:
        session.execute(text("insert into change_epoch default values on conflict do nothing"))


def between(
    session: Session, seen: Position, now: Position, regions: Collection[str] | None = None
) -> set[Change] | None:
    """What has changed since `seen`, as of the session's own position `now`.

    With `regions`, only what may matter to one of them. None: the log does not reach back so far, and only reading
    everything helps.
    """
    if seen.epoch != now.epoch or now.forgotten_txid >= seen.xmin or now.xmin < seen.xmin:
        return None
    found = session.execute(
        text(
            "select distinct kind, key, attempt from change"
            # The upper end says nothing new: it tells the planner, which may know nothing yet, that these are few.
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
    return {Change(*row) for row in found}


def forget(session: Session, keep: timedelta) -> None:
    """Deletes changes that are older than `keep`, and notes how far they went."""
    session.execute(
        text(
            "with gone as (delete from change where at < now() - :keep returning txid)"
            " update change_epoch set forgotten_txid = greatest(forgotten_txid, (select max(txid) from gone))"
            " where exists (select from gone)"
        ),
        {"keep": keep},
    )
