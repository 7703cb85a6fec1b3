"""The event log. Events are written in the transaction of the change, and read in an order without gaps.

A serial id is assigned before its transaction commits, so a reader that stores the largest id would miss events that
commit late. Readers instead follow the order (txid, id) and stop before the oldest transaction in flight: no event
below it can be added later.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVarTuple

from sqlalchemy import Select, literal_column, select, text, tuple_
from sqlalchemy.orm import Session

from domain.reasons import Reason
from infra.db.logs import Event

Row = TypeVarTuple("Row")
CHANNEL = "mizzen_event"
"""`NOTIFY` channel for new events in the event log."""
RESTORED_TXID = 1
"""Transaction id given to events restored from a backup. It precedes all others: Postgres starts at 3."""
_RECORD = text(
    "with written as ("
    " insert into event (kind, tenant, workload, attempt, region, machine, reason, detail, dedup)"
    " values (:kind, :tenant, :workload, :attempt, :region, :machine, cast(:reason as jsonb),"
    " cast(:detail as jsonb), :dedup) on conflict on constraint event_once do nothing returning id"
    f") select pg_notify('{CHANNEL}', '') from written"
)


@dataclass(frozen=True, order=True)
class Cursor:
    """A position in the event log. Its text form is `txid-id`, as in SSE's `Last-Event-ID`."""

    txid: int = 0
    id: int = 0

    def __str__(self) -> str:
        return f"{self.txid}-{self.id}"

    @classmethod
    def parse(cls, text_: str) -> "Cursor":
        """Parses the text form of a cursor.

        Raises:
            ValueError: the text does not have the form `txid-id`.
        """
        txid, dash, id_ = text_.partition("-")
        if not (dash and txid.isascii() and id_.isascii() and txid.isdigit() and id_.isdigit()):
            raise ValueError(f"{text_!r} is not an event id of the form 123-45")
        if int(txid) >= 1 << 63 or int(id_) >= 1 << 63:
            raise ValueError(f"{text_!r} is out of range for an event id")
        return cls(int(txid), int(id_))


def record(
    session: Session,
    kind: str,
    *,
    tenant: str | None = None,
    workload: str | None = None,
    attempt: int | None = None,
    region: str | None = None,
    machine: str | None = None,
    reason: Reason | dict[str, Any] | None = None,
    detail: dict[str, Any] | None = None,
    dedup: str | None = None,
) -> bool:
    """Writes one event in the session's transaction, and notifies readers when it commits.

    Returns False, and writes nothing, if the workload already has an event with the key `dedup`.
    """
    body = reason.to_json() if isinstance(reason, Reason) else reason
    values = {
        "kind": kind,
        "tenant": tenant,
        "workload": workload,
        "attempt": attempt,
        "region": region,
        "machine": machine,
        "reason": None if body is None else json.dumps(body),
        "detail": json.dumps(detail or {}),
        "dedup": dedup,
    }
    session.flush()
    return session.execute(_RECORD, values).first() is not None


def concerned_after(session: Session, cursor: Cursor, *, limit: int) -> Sequence[tuple[Cursor, str | None, str | None]]:
    """Returns the position, the workload and the tenant of at most `limit` events after `cursor`, see `read_after`."""
    found = session.execute(_after(select(Event.txid, Event.id, Event.workload, Event.tenant), cursor, limit))
    return [(Cursor(txid, number), workload, tenant) for txid, number, workload, tenant in found]


def _after(statement: Select[*Row], cursor: Cursor, limit: int) -> Select[*Row]:
    return (
        statement.where(tuple_(Event.txid, Event.id) > (cursor.txid, cursor.id))
        .where(Event.txid < literal_column("pg_snapshot_xmin(pg_current_snapshot())::text::bigint"))
        .order_by(Event.txid, Event.id)
        .limit(limit)
    )


def read_after(
    session: Session,
    cursor: Cursor,
    *,
    workload: str | None = None,
    tenant: str | None = None,
    kind: str | None = None,
    kinds: Collection[str] = (),
    limit: int = 500,
) -> Sequence[Event]:
    """Returns at most `limit` events after `cursor`, oldest first, below the oldest transaction in flight."""
    statement = _after(select(Event), cursor, limit)
    if workload is not None:
        statement = statement.where(Event.workload == workload)
    if tenant is not None:
        statement = statement.where(Event.tenant == tenant)
    if kind is not None:
        statement = statement.where(Event.kind == kind)
    if kinds:
        statement = statement.where(Event.kind.in_(kinds))
    return session.scalars(statement).all()


def position(session: Session) -> Cursor:
    """Returns the newest position that a reader can have reached now."""
    txid = session.execute(text("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint - 1")).scalar_one()
    return Cursor(int(txid), (1 << 63) - 1)


def resumed(session: Session, cursor: Cursor) -> Cursor:
    """Returns the position at which a reader with `cursor` continues.

    A position beyond the newest one is from before the database was restored from a backup. Restored events have the
    transaction `RESTORED_TXID`, which is before all others.
    """
    return Cursor(RESTORED_TXID, cursor.id) if cursor.txid > position(session).txid else cursor
