"""The transactional outbox: messages to Temporal workflows, written in the transaction of the change that they report.

`activities.lifecycle.dispatch` delivers the messages after the commit.
"""

import json
from dataclasses import asdict
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.protocol.data import ON_DEMAND
from domain.protocol.sessions import OpenSession
from domain.protocol.workload_messages import MessageKind
from infra.db import events

CHANNEL = "mizzen_outbox"
"""`NOTIFY` channel for new messages in the outbox."""
_PUT = text(
    "with put as (insert into outbox (kind, workload, body) values (:kind, :workload, cast(:body as jsonb)))"
    f" select pg_notify('{CHANNEL}', '')"
)

_BACKLOG = text(
    "select count(*), greatest(0, coalesce(extract(epoch from clock_timestamp() - min(created_at)), 0))::float8"
    " from outbox where delivered_at is null"
)


def wake_readers(session: Session) -> None:
    """Notifies the readers of the outbox and the event log, after writes that did not notify.

    Postgres serialises the commits of transactions that notify. So concurrent transactions should write without
    notifying, and a later transaction should call this.
    """
    session.execute(text(f"select pg_notify('{events.CHANNEL}', ''), pg_notify('{CHANNEL}', '')"))


class Backlog(NamedTuple):
    """The messages that have not been delivered yet."""

    messages: int
    oldest_s: float
    """Age of the oldest in seconds; 0 if there is none."""


def backlog(session: Session) -> Backlog:
    """Returns the number of messages that wait, and the age of the oldest."""
    return Backlog(*session.execute(_BACKLOG).one())


def _put(session: Session, kind: str, workload: str | None, body: dict[str, Any]) -> None:
    session.flush()
    session.execute(_PUT, {"kind": kind, "workload": workload, "body": json.dumps(body)})


def start_workload(session: Session, workload: str, *, attempt: int = 0, placed: bool = False) -> None:
    """Starts the workload's workflow after this transaction commits, with the given attempt and state."""
    _put(session, "start", workload, {"attempt": attempt, "placed": placed})


def message(session: Session, workload: str, kind: MessageKind, attempt: int, **detail: object) -> None:
    """Sends a message about `attempt` to a workload's workflow. `attempt` 0 means the current attempt on delivery."""
    _put(session, "mail", workload, {"kind": kind.value, "attempt": attempt, "detail": detail})


def unconfirmed(session: Session, machine: str, run: str, grace_s: float = 0.0) -> None:
    """Sends a request to a machine's workflow to stop `run` (`workload.attempt`), with `grace_s` seconds to save.

    Used if an attempt was released on the machine before it was confirmed that its tasks had ended.
    """
    _put(session, "unconfirmed", None, {"machine": machine, "run": run, "grace_s": grace_s})


def wake_scheduler(session: Session) -> None:
    """Requests a scan pass of the scheduler, after a change that may allow a queued workload to be placed."""
    _put(session, "wake", None, {})


def replicate(session: Session, table: str, source_region: str, target_region: str, share: str = ON_DEMAND) -> None:
    """Starts the copy of a replica's missing partitions, unless it is running. `share` is its bandwidth class."""
    body = {"table": table, "source": source_region, "target": target_region, "share": share}
    _put(session, "replicate", None, body)


def placement_run(session: Session, placement_run_: str) -> None:
    """Starts the workflow of a nightly run, or signals the running one to check whether moves are paused."""
    _put(session, "placement_run", None, {"placement_run": placement_run_})


def scrub(session: Session, region: str) -> None:
    """Starts the verification of a region's copies, or signals the running one to check which copies are due."""
    _put(session, "scrub", None, {"region": region})


def service(session: Session, service_: str) -> None:
    """Starts the workflow of a service, or signals the running one to compare its replicas with the target again."""
    _put(session, "service", None, {"service": service_})


def task_session(session: Session, request: OpenSession) -> None:
    """Starts the workflow that asks the agent of a task's machine to join a session."""
    _put(session, "session", None, asdict(request))


def instance(session: Session, instance_: str) -> None:
    """Starts the workflow of an instance, or signals the running one to read the ledger."""
    _put(session, "instance", None, {"instance": instance_})
