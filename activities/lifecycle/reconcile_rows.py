"""The Postgres queries and updates of the reconciler (`activities.lifecycle.reconcile`)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, or_, select, text
from sqlalchemy.orm import Session

from domain import ids
from domain.phases import PLACED_PHASES
from domain.protocol.workload_messages import MessageKind
from infra.db import outbox
from infra.db.models import Attempt, Machine, Workload
from infra.db.placement_runs import open_placement_run
from infra.db.tables import Replica, Table

_PLACED = sorted(p.value for p in PLACED_PHASES)
_AGAIN = "o.delivered_at < now() - greatest(make_interval(secs => :patience_s), o.delivered_at - o.created_at)"
"""Selects messages whose delivery is old enough. The interval doubles with each delivery, so that a slow effect does
not cause endless repetitions."""


def redeliver_unanswered(session: Session, patience_s: float) -> None:
    """Redelivers messages that show no effect in Postgres `patience_s` seconds after their delivery.

    The receiving workflow may have been rolled back to before the delivery. Otherwise it drops the duplicate.
    """
    session.execute(
        text(
            "update outbox as o set delivered_at = null from workload as w"
            f" where o.kind = 'mail' and w.id = o.workload and w.finished_at is null and {_AGAIN}"
            " and (o.body ->> 'kind' = :cancel and (o.body ->> 'attempt')::int in (0, w.attempt)"
            " or (o.body ->> 'attempt')::int = w.attempt and ("
            " o.body ->> 'kind' = any(:to_start) and w.phase = 'placing'"
            " or o.body ->> 'kind' = any(:to_stop) and w.phase = any(:running)))"
        ),
        {
            "patience_s": patience_s,
            "cancel": MessageKind.CANCEL.value,
            "to_start": [MessageKind.AWARDED.value, MessageKind.SLOTS_READY.value],
            "to_stop": [
                k.value for k in (MessageKind.EVICT, MessageKind.PREEMPT, MessageKind.MACHINE_LOST, MessageKind.HUNG)
            ],
            "running": [p for p in _PLACED if p != "checkpointing"],
        },
    )
    session.execute(
        text(
            "update outbox as o set delivered_at = null from allocation as a join machine as m on m.id = a.machine"
            f" where o.kind = 'unconfirmed' and {_AGAIN.replace(':patience_s', _WITH_GRACE)}"
            " and o.body ->> 'machine' = a.machine and o.body ->> 'run' = a.workload || '.' || a.attempt"
            " and a.released_at is not null and a.stopped_at is null and m.state <> 'lost'"
        ),
        {"patience_s": patience_s},
    )


_WITH_GRACE = ":patience_s + coalesce((o.body ->> 'grace_s')::float, 0)"


def redeliver_all(session: Session, workload: str) -> None:
    """Redelivers all messages about a workload's current attempt."""
    session.execute(
        text(
            "update outbox as o set delivered_at = null from workload as w"
            " where w.id = :workload and o.workload = w.id and o.kind = 'mail'"
            " and (o.body ->> 'attempt')::int in (0, w.attempt)"
        ),
        {"workload": workload},
    )


def start_again(session: Session, workloads: Sequence[str]) -> None:
    """Requests new workflows for live workloads, and redelivers their messages."""
    for workload in workloads:
        row = session.get(Workload, workload, with_for_update=True)
        if row is not None and row.finished_at is None:
            redeliver_all(session, workload)
            outbox.start_workload(session, workload, attempt=row.attempt, placed=row.phase in PLACED_PHASES)


def placed_or_named(session: Session, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Returns phase and attempt, by id, of all placed workloads and of the workloads `names` that exist."""
    placed = and_(Workload.finished_at.is_(None), Workload.phase.in_(_PLACED), Workload.runner.is_(None))
    rows = select(Workload.id, Workload.phase, Workload.attempt).where(or_(placed, Workload.id.in_(names)))
    return {id_: (phase, attempt) for id_, phase, attempt in session.execute(rows)}


def placed(session: Session, age_s: float) -> int:
    """Returns the number of unreleased attempts that were awarded more than `age_s` seconds ago."""
    old = Attempt.awarded_at < _ago(age_s)
    counted = select(func.count()).select_from(Attempt).where(Attempt.released_at.is_(None), old)
    return session.scalar(counted) or 0


def missing(session: Session, running: Collection[str], quiet_s: float) -> list[str]:
    """Returns the placed workloads not in `running` that have no pending message, and no event for `quiet_s` seconds.

    A queued workload needs no workflow: its next award starts one.
    """
    is_placed = and_(Workload.finished_at.is_(None), Workload.phase.in_(_PLACED), Workload.runner.is_(None))
    found = session.scalars(select(Workload.id).where(is_placed).order_by(Workload.id))
    return _quiet(session, [workload for workload in found if workload not in running], quiet_s)


def ended(session: Session, workloads: Collection[str], age_s: float) -> list[str]:
    """Returns the workloads, out of `workloads`, that ended more than `age_s` seconds ago."""
    old = Workload.finished_at < _ago(age_s)
    return list(session.scalars(select(Workload.id).where(Workload.id.in_(workloads), old).order_by(Workload.id)))


def is_quiet(session: Session, workload: str, phase: str | None, attempt: int | None, quiet_s: float) -> bool:
    """Returns whether a live workload has this phase and attempt, no pending message, and no event for `quiet_s`."""
    row = session.get(Workload, workload)
    if row is None or row.finished_at is not None or (row.phase, row.attempt) != (phase, attempt):
        return False
    return _quiet(session, [workload], quiet_s) != []


def _quiet(session: Session, workloads: list[str], quiet_s: float) -> list[str]:
    rows = session.scalars(
        text(
            "select w.id from workload as w where w.id = any(:workloads)"
            " and not exists (select from outbox as o where o.workload = w.id and o.delivered_at is null)"
            " and coalesce((select max(e.at) from event as e where e.workload = w.id), w.submitted_at)"
            " <= now() - make_interval(secs => :quiet_s) order by w.id"
        ),
        {"workloads": workloads, "quiet_s": quiet_s},
    )
    return list(rows)


def present_machines(session: Session) -> dict[str, str]:
    """Returns the machines that are not lost, with their incarnations."""
    rows = session.execute(select(Machine.id, Machine.incarnation).where(Machine.state != "lost"))
    return {row.id: row.incarnation for row in rows}


@dataclass(frozen=True)
class WantedWorkflow:
    """A table copy or a placement run that needs a running workflow."""

    placement_run: str | None = None
    table: str = ""
    source: str = ""
    target: str = ""


def wanted_copies(session: Session) -> dict[str, WantedWorkflow]:
    """Returns the table copies and the open placement run that need a workflow, by workflow id.

    Copies that are part of a placement run need no workflow of their own.
    """
    own = or_(Replica.made_by != "placement_run", Replica.requested_by.is_not(None))
    rows = session.execute(
        select(Replica.data_table, Table.home_region, Replica.region)
        .join(Table, Table.name == Replica.data_table)
        .where(or_(and_(Replica.state == "copying", own), Replica.topping_up))
    )
    out = {ids.replica_workflow_id(t, target): WantedWorkflow(None, t, source, target) for t, source, target in rows}
    placement_run = open_placement_run(session)
    return out if placement_run is None else out | {placement_run.id: WantedWorkflow(placement_run.id)}


def put(session: Session, wanted: WantedWorkflow) -> None:
    """Requests the start of the workflow."""
    if wanted.placement_run is not None:
        outbox.placement_run(session, wanted.placement_run)
    else:
        outbox.replicate(session, wanted.table, wanted.source, wanted.target)


def _ago(seconds: float) -> Any:
    return text("now() - make_interval(secs => :s)").bindparams(s=seconds)
