"""Writing mail to Temporal in the transaction that makes it true. `activities.lifecycle.dispatch` delivers it."""

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.protocol import ON_DEMAND, MailKind
from infra.db import events

CHANNEL = "mizzen_outbox"
"""`NOTIFY` channel: something was put into the outbox."""
_PUT = text(
    "with put as (insert into outbox (kind, workload, body) values (:kind, :workload, cast(:body as jsonb)))"
    f" select pg_notify('{CHANNEL}', '')"
)


def wake_readers(session: Session) -> None:
    """Wakes those who read the outbox and the event log, after writes that did not.

    Commits of transactions that notify wait for each other: many at once had better leave it to one that comes after.
    """
    session.execute(text(f"select pg_notify('{events.CHANNEL}', ''), pg_notify('{CHANNEL}', '')"))


def _put(session: Session, kind: str, workload: str | None, body: dict[str, Any]) -> None:
    session.flush()
    session.execute(_PUT, {"kind": kind, "workload": workload, "body": json.dumps(body)})


def start_workload(session: Session, workload: str, *, attempt: int = 0, placed: bool = False) -> None:
    """Starts the workload's workflow once this transaction is committed, at the state that it has in it."""
    _put(session, "start", workload, {"attempt": attempt, "placed": placed})


def mail(session: Session, workload: str, kind: MailKind, attempt: int, **detail: object) -> None:
    """Tells a workload's workflow something about `attempt` (0: whichever it is then)."""
    _put(session, "mail", workload, {"kind": kind.value, "attempt": attempt, "detail": detail})


def unconfirmed(session: Session, machine: str, run: str, grace_s: float = 0.0) -> None:
    """Asks a machine's workflow to stop `run` (`workload.attempt`) there: it was released before its tasks had ended,
    for all that is known. They have `grace_s` to save.
    """
    _put(session, "unconfirmed", None, {"machine": machine, "run": run, "grace_s": grace_s})


def wake_scheduler(session: Session) -> None:
    """Asks for a GMS scan pass: something changed that could let a queued workload be placed."""
    _put(session, "wake", None, {})


def replicate(session: Session, table: str, source_region: str, target_region: str, share: str = ON_DEMAND) -> None:
    """Starts the copy of what a region's replica of a table lacks, if it does not run; `share` is of the bandwidth."""
    body = {"table": table, "source": source_region, "target": target_region, "share": share}
    _put(session, "replicate", None, body)


def night(session: Session, night_: str) -> None:
    """Starts the workflow of a night, or has the one that runs look whether moves are paused."""
    _put(session, "night", None, {"night": night_})


def scrub(session: Session, region: str) -> None:
    """Starts the verification of a region's copies, or has the one that runs look for what is due now."""
    _put(session, "scrub", None, {"region": region})


def instance(session: Session, instance_: str) -> None:
    """Starts the workflow of an instance, or has the one that runs look at the ledger."""
    _put(session, "instance", None, {"instance": instance_})
