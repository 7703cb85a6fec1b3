"""Alerts for operators: new events of some kinds, and states of the installation that begin or end.

One round makes at most one notification for each receiver, with all that has happened since the round before.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from activities.leader import Leader, lead
from infra.config.notify import ALERT_EVENTS, AlertReceiver
from infra.db import events
from infra.db.buckets import failing_buckets
from infra.db.deliveries import Delivery, lane_of
from infra.db.logs import Event, Publication
from infra.db.models import Region
from infra.db.rounds import loop_states
from infra.db.session import in_thread, transaction
from infra.db.silent_regions import silence_reason, silent_regions

_NAME = "alerts"
_INTERVAL_S = 10.0
_MOST = 100
"""The most alerts in a notification. It says how many more there are."""
_READ_AT_ONCE = 500


class Alerts:
    """The loop that writes the notifications of operators."""

    def __init__(self, engine: Engine, receivers: Sequence[AlertReceiver]) -> None:
        self._engine, self._receivers = engine, receivers

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.ALERTING, "alerts", lambda: in_thread(self.round), _INTERVAL_S)

    def round(self) -> None:
        """Writes the notifications of what is new since the last round. The first round only reads the states."""
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            before = session.scalar(select(Publication.body).where(Publication.name == _NAME))
            states = dict(_states(session))
            if before is None:
                cursor, found = events.position(session), list[dict[str, Any]]()
            else:
                cursor, found = _new_events(session, events.Cursor.parse(before["cursor"]))
            found += _changes((before or {}).get("states", {}), states)
            for receiver in self._receivers:
                if wanted := [alert for alert in found if alert["kind"] in receiver.on]:
                    session.add(_notification(receiver, wanted))
            body = {"cursor": str(cursor), "states": states}
            new = insert(Publication).values(name=_NAME, body=body)
            session.execute(new.on_conflict_do_update(index_elements=["name"], set_={"body": new.excluded.body}))


def _new_events(session: Session, cursor: events.Cursor) -> tuple[events.Cursor, list[dict[str, Any]]]:
    rows = events.read_after(session, cursor, kinds=ALERT_EVENTS, limit=_READ_AT_ONCE)
    if len(rows) < _READ_AT_ONCE:
        return events.position(session), [_of_event(row) for row in rows]
    return events.Cursor(rows[-1].txid, rows[-1].id), [_of_event(row) for row in rows]


def _of_event(row: Event) -> dict[str, Any]:
    said = (row.reason or {}).get("sentence") or ", ".join(f"{key} {value}" for key, value in row.detail.items())
    return {"kind": row.kind, "at": row.at.isoformat(), "subject": row.machine or row.region, "text": said}


def _states(session: Session) -> Iterator[tuple[str, str]]:
    """Yields each state that needs attention, as `KIND SUBJECT`, with a sentence."""
    loops, now_s = loop_states(session)
    for name, loop in loops.items():
        if (judged := loop.judge(now_s)) != "ok":
            yield f"loop.failing {name}", f"the loop is {judged}: {loop.error or 'no round has succeeded'}"
    for name, region in silent_regions(session).items():
        if not region.slow:
            yield f"region.silent {name}", silence_reason(name, region.since_s).sentence
    for name, reason in failing_buckets(session, session.scalars(select(Region.name))).items():
        yield f"region.bucket_unavailable {name}", reason.sentence


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns an alert for each state that has begun, or has ended."""
    begun = [(state, now[state], False) for state in sorted(now.keys() - before.keys())]
    ended = [(state, f"has ended: {before[state]}", True) for state in sorted(before.keys() - now.keys())]
    return [
        {"kind": kind, "subject": subject, "text": said, "resolved": is_over}
        for state, said, is_over in begun + ended
        for kind, _, subject in [state.partition(" ")]
    ]


def _notification(receiver: AlertReceiver, found: list[dict[str, Any]]) -> Delivery:
    to = receiver.to_json()
    facts = {"alerts": found[:_MOST], "more": max(0, len(found) - _MOST)}
    return Delivery(kind="alert", receiver=to, lane=lane_of("alerts", to), facts=facts)
