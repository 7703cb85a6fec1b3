"""Reads the history of a demo run from Postgres: allocations, attempts and events."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from domain.slots import TaskSlots
from domain.spec import WorkloadSpec
from infra.db.logs import Event
from infra.db.models import Allocation, Attempt, Machine, Workload
from infra.db.session import transaction
from infra.db.tasks import tasks_of


@dataclass(frozen=True)
class Hold:
    """A period in which one task held one GPU slot; times are seconds since the epoch."""

    machine: str
    slot: int
    workload: str
    name: str
    tenant: str
    attempt: int
    task: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class AttemptFact:
    """One attempt of a workload."""

    workload: str
    name: str
    attempt: int
    region: str
    resumed_step: int | None
    last_step: int | None
    checkpoint_step: int | None
    start_s: float
    end_s: float
    outcome: str


@dataclass(frozen=True)
class Facts:
    """The history of a whole run."""

    workloads: dict[str, dict[str, Any]]
    """Id to name, tenant, phase, submitted_s, finished_s and checkpoint_region."""
    holds: tuple[Hold, ...]
    attempts: tuple[AttemptFact, ...]
    events: tuple[dict[str, Any], ...]
    machines: tuple[tuple[str, str, str | None, int], ...]
    """(id, region, GPU type, slots)."""

    def attempts_of(self, workload: str) -> list[AttemptFact]:
        """Returns a workload's attempts, oldest first."""
        return [a for a in self.attempts if a.workload == workload]


def _seconds(at: datetime | None, default: float) -> float:
    return at.timestamp() if at is not None else default


def _tasks(session: Session, rows: Mapping[str, Workload]) -> Iterator[tuple[Attempt, TaskSlots, Allocation]]:
    """Yields every task of every attempt, with its allocation."""
    found = session.scalars(select(Allocation).order_by(Allocation.workload, Allocation.attempt, Allocation.machine))
    for (workload, number), allocations in groupby(found.all(), lambda a: (a.workload, a.attempt)):
        own = {a.machine: a for a in allocations}
        attempt = session.get_one(Attempt, (workload, number))
        for task in tasks_of(WorkloadSpec.model_validate(rows[workload].spec), attempt, own.values()):
            yield attempt, task, own[task.machine]


def read_facts(engine: Engine, now_s: float) -> Facts:
    """Reads the history up to now. Holds and attempts that have not ended get the end time `now_s`."""
    with transaction(engine, isolation="REPEATABLE READ") as session:
        rows = {row.id: row for row in session.scalars(select(Workload).order_by(Workload.id))}
        machines = {m.id: m for m in session.scalars(select(Machine).order_by(Machine.id))}
        holds = [
            Hold(
                machine=task.machine,
                slot=slot,
                workload=attempt.workload,
                name=rows[attempt.workload].name,
                tenant=rows[attempt.workload].tenant,
                attempt=attempt.attempt,
                task=f"{task.job}/{task.task}",
                start_s=_seconds(held.held_at, now_s),
                end_s=_seconds(held.released_at, now_s),
            )
            for attempt, task, held in _tasks(session, rows)
            if held.held_at is not None
            for slot in task.slots
        ]
        attempts = tuple(
            AttemptFact(
                workload=a.workload,
                name=rows[a.workload].name,
                attempt=a.attempt,
                region=a.region,
                resumed_step=a.resumed_step,
                last_step=a.last_step,
                checkpoint_step=a.checkpoint_step,
                start_s=_seconds(a.started_at or a.awarded_at, now_s),
                end_s=_seconds(a.released_at, now_s),
                outcome=str((a.outcome or {}).get("code", "")),
            )
            for a in session.scalars(select(Attempt).order_by(Attempt.workload, Attempt.attempt))
        )
        events = tuple(
            {
                "at_s": e.at.timestamp(),
                "kind": e.kind,
                "workload": e.workload,
                "attempt": e.attempt,
                "region": e.region,
                "machine": e.machine,
                "reason": e.reason,
                "detail": e.detail,
            }
            for e in session.scalars(select(Event).order_by(Event.txid, Event.id))
        )
    return Facts(
        workloads={
            row.id: {
                "name": row.name,
                "tenant": row.tenant,
                "phase": row.phase,
                "submitted_s": row.submitted_at.timestamp(),
                "finished_s": _seconds(row.finished_at, now_s),
                "checkpoint_region": row.checkpoint_region,
            }
            for row in rows.values()
        },
        holds=tuple(holds),
        attempts=attempts,
        events=events,
        machines=tuple((m.id, m.region, m.gpu_type, m.gpus) for m in machines.values()),
    )
