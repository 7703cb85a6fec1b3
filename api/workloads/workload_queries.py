"""Reads workloads from Postgres and builds the responses."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from sqlalchemy import ARRAY, Text, any_, bindparam, func, inspect, select, tuple_
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session, defer

from api.auth import Caller
from api.documents.document_of import document_of
from api.paging import page
from api.problems import not_found
from api.views import notification_views, reason_view
from api.workloads.elements import array_view, element_view, waiting_element
from api.workloads.expected_start import start_view
from api.workloads.reasons import Why, waits_of, why_all, why_new
from api.workloads.views import (
    AllocationList,
    AllocationView,
    AttemptList,
    AttemptView,
    BandwidthView,
    CurveView,
    DependencyView,
    JobView,
    LeftView,
    PlacementView,
    PointView,
    ProgressView,
    TaskResourcesView,
    WorkloadDetail,
    WorkloadView,
)
from domain.ids import split_element
from domain.lifecycle.retry_limits import PREEMPTIONS
from domain.phases import QUEUED_PHASES, Phase
from domain.slots import TaskSlots, bits, tasks_of_jobs
from domain.spec import WorkloadSpec
from domain.task_reports import BandwidthReport
from infra.db.array_rows import counts_of
from infra.db.costs import costs_of
from infra.db.dependencies import Dependency, dependencies_of
from infra.db.lost_work import lost_by
from infra.db.models import Allocation, Attempt, Workload
from infra.db.published_queue import Newest
from infra.db.tasks import tasks_of
from infra.db.tenants import Tenant

# Statements that every request uses are built once, because building one takes as long as executing it.
_FOUND = select(Workload).where(Workload.id == bindparam("id"))
_LOCKED = _FOUND.with_for_update().execution_options(populate_existing=True)
_CURVES = 20
"""Number of attempts whose steps over time are returned."""
_LEVELS = select(Tenant.name, Tenant.level).where(Tenant.name == any_(bindparam("names", type_=ARRAY(Text))))
_OF_ANY = Attempt.workload == any_(bindparam("ids", type_=ARRAY(Text)))


def _newest(name: str, column: Any, known: Any) -> Any:
    values = func.array_agg(aggregate_order_by(column, Attempt.attempt.desc()))
    return values.filter(known.is_not(None))[1].label(name)


_TRIED = (
    select(
        Attempt.workload,
        func.clock_timestamp().label("now"),
        func.count().filter(Attempt.outcome["code"].astext.in_(PREEMPTIONS)).label("preemptions"),
        func.coalesce(func.sum(Attempt.lost_s), 0.0).label("lost_s"),
        _newest("step", Attempt.last_step, Attempt.last_step),
        _newest("metrics", Attempt.metrics, Attempt.metrics),
        _newest("saved_step", Attempt.checkpoint_step, Attempt.checkpoint_at),
        _newest("at", Attempt.checkpoint_at, Attempt.checkpoint_at),
        _newest("bytes", Attempt.checkpoint_bytes, Attempt.checkpoint_at),
        _newest("held_s", Attempt.checkpoint_s, Attempt.checkpoint_at),
        _newest("write_s", Attempt.checkpoint_write_s, Attempt.checkpoint_at),
        _newest("cadence", Attempt.cadence, Attempt.cadence),
        _newest("load", Attempt.load, Attempt.load),
        _newest("failing", Attempt.failing, Attempt.attempt),
        _newest("notice", Attempt.notice, Attempt.attempt),
    )
    .where(_OF_ANY)
    .group_by(Attempt.workload)
)
_RUNNING = (
    select(Attempt)
    .options(defer(Attempt.plan), defer(Attempt.earned), defer(Attempt.gpu_use), defer(Attempt.metrics))
    .where(_OF_ANY, Attempt.released_at.is_(None), Attempt.started_at.is_not(None))
)


def names_of(session: Session, caller: Caller, ids: Collection[str]) -> dict[str, str]:
    """Returns the names of those of the workloads that the caller may see, by id; of an element, with its index."""
    if not ids:
        return {}
    found = session.execute(
        select(Workload.id, Workload.name, Workload.array_index, Workload.tenant).where(Workload.id.in_(ids))
    )
    return {
        id_: name if index is None else f"{name}/{index}" for id_, name, index, tenant in found if caller.sees(tenant)
    }


def find(session: Session, caller: Caller, workload_id: str, *, lock: bool = False) -> Workload:
    """Returns the row of a workload. `lock`: lock the row for update.

    An element of an array that was never placed gets a row if `lock` is set, else a row that is not in the database.

    Raises:
        Problem: 404, with the same message if the workload does not exist and if it belongs to another tenant.
    """
    row = session.scalars(_LOCKED if lock else _FOUND, {"id": workload_id}).first()
    if row is None and (element := split_element(workload_id)) is not None:
        row = waiting_element(session, caller, *element, lock=lock)
    if row is None or not caller.sees(row.tenant):
        raise not_found("workload", workload_id, is_hidden=row is not None)
    return row


def effective_level(session: Session, row: Workload) -> int:
    """Returns the effective level: the tenant's, or the lower one that was requested."""
    return max(session.get_one(Tenant, row.tenant).level, row.level or 0)


def view(session: Session, queue: Newest, row: Workload) -> WorkloadView:
    """Returns the view of one workload. `queue` is the queue that the last scan published."""
    return views(session, queue, [row])[0]


def views(session: Session, queue: Newest, rows: Sequence[Workload]) -> list[WorkloadView]:
    """Returns the views of several workloads, with a fixed number of queries."""
    return [WorkloadView(**fields) for fields in _fields(session, rows, why_all(session, queue, rows))]


def detail(session: Session, queue: Newest, row: Workload) -> WorkloadDetail:
    """Returns one workload with its specification, placement and cost."""
    (fields,) = _fields(session, [row], why_all(session, queue, [row]))
    held = select(Allocation).where(
        Allocation.workload == row.id, Allocation.attempt == row.attempt, Allocation.released_at.is_(None)
    )
    live = session.scalars(held).all() if row.attempt else []  # A workload that was never placed has no allocations.
    tasks: list[TaskSlots] = []
    if live:
        tasks = tasks_of(WorkloadSpec.model_validate(row.spec), session.get_one(Attempt, (row.id, row.attempt)), live)
    placement = [
        PlacementView(machine=t.machine, job=t.job, task=t.task, slots=list(t.slots))
        for t in sorted(tasks, key=lambda t: (t.job, t.task))
    ]
    spent = costs_of(session, row.id) if row.attempt else []
    return WorkloadDetail(
        **fields, **_specified(session, row), placement=placement,
        cost_usd=sum(cost.usd for cost in spent), unpriced_h=sum(cost.unpriced_h for cost in spent),
    )  # fmt: skip


def attempts(session: Session, row: Workload, limit: int, after: int) -> AttemptList:
    """Returns at most `limit` of a workload's attempts with numbers above `after`, oldest first."""
    own = (Attempt.workload == row.id, Attempt.attempt > after)
    wanted = select(Attempt).where(*own).order_by(Attempt.attempt).limit(limit + 1)
    found, following = page(session.scalars(wanted).all(), limit, lambda a: str(a.attempt))
    items = [
        AttemptView.from_row(
            a,
            outcome=reason_view(a.outcome),
            tasks=sum(tasks_of_jobs(a.plan["jobs"]).values()),
            bandwidth=_bandwidth(a),
            stale_tables=a.stale_tables or {},
            gpus=a.gpu_types,
            cpus=a.cpus_milli / 1000,
            left=[_left(one) for one in a.left_files or []],
            unstored=a.unstored or [],
            gpu_use=a.gpu_use or [],
        )
        for a in found
    ]
    return AttemptList(items=items, next_cursor=following)


def curve(session: Session, row: Workload) -> CurveView:
    """Returns the steps and metrics of a workload's newest attempts over time, by attempt and step."""
    newest = select(Attempt.attempt, Attempt.curve).where(Attempt.workload == row.id, Attempt.curve.is_not(None))
    rows = session.execute(newest.order_by(Attempt.attempt.desc()).limit(_CURVES)).all()
    return CurveView(
        points=[
            PointView(attempt=number, step=step, at=datetime.fromtimestamp(at_s, UTC), metrics=metrics)
            for number, points in reversed(rows)
            for step, at_s, metrics in points
        ]
    )


def _left(one: Mapping[str, Any]) -> LeftView:
    until = datetime.fromtimestamp(one["until_s"], UTC)
    return LeftView(until=until, **{name: one[name] for name in ("job", "task", "machine", "path", "bytes")})


def _bandwidth(attempt: Attempt) -> BandwidthView | None:
    if attempt.bandwidth is None:
        return None
    found = BandwidthReport(**attempt.bandwidth)
    measured_at = datetime.fromtimestamp(found.at_s, UTC)
    return BandwidthView(measured_at=measured_at, mean_bytes_s=found.bytes_s, lower_bytes_s=found.lower_bytes_s)


def submitted(session: Session, row: Workload) -> WorkloadDetail:
    """Returns a workload that was created in this transaction; it has no scan result and no attempt yet."""
    counts = counts_of(session, [row.id]).get(row.id) if row.spec.get("array") is not None else None
    (fields,) = _fields(session, [row], {row.id: replace(why_new(row), array=counts)})
    return WorkloadDetail(**fields, **_specified(session, row), placement=[], cost_usd=0.0, unpriced_h=0.0)


def _specified(session: Session, row: Workload) -> dict[str, Any]:
    """Returns the document, the dependencies with their states, and the notifications."""
    spec = WorkloadSpec.model_validate(row.spec)
    found = dependencies_of(session, [row.id]).get(row.id, []) if spec.has_dependencies else []
    told = notification_views(session, row.id) if spec.notify and row.finished_at is not None else []
    return {"spec": document_of(spec), "after": [_dependency(*one) for one in found], "notifications": told}


def _dependency(row: Dependency, phase: str | None) -> DependencyView:
    return DependencyView.from_row(row, table=row.data_table, not_before=row.due_at, phase=phase)


def allocations(session: Session, row: Workload, limit: int, after: tuple[int, str]) -> AllocationList:
    """Returns at most `limit` of a workload's allocations that follow `after`, (attempt, machine), oldest first.

    What is booked for the next attempt is not included.
    """
    order = (Allocation.attempt, Allocation.machine)
    own = Allocation.workload == row.id, Allocation.attempt <= row.attempt
    own_rows = select(Allocation).where(*own).order_by(*order)
    wanted = own_rows.where(tuple_(*order) > tuple_(*after)).limit(limit + 1)
    found, following = page(session.scalars(wanted).all(), limit, lambda a: f"{a.attempt}:{a.machine}")
    # The tasks of a machine can be derived only from all allocations of the attempt.
    numbers = {a.attempt for a in found}
    whole = session.scalars(own_rows.where(Allocation.attempt.in_(numbers))).all()
    placed = select(Attempt).where(Attempt.workload == row.id, Attempt.attempt.in_(numbers))
    attempts = {a.attempt: a for a in session.scalars(placed)}
    tasks: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    spec = WorkloadSpec.model_validate(row.spec)
    for number, held in groupby(whole, lambda a: a.attempt):
        for t in tasks_of(spec, attempts[number], held):
            tasks[number, t.machine].append({"job": t.job, "task": t.task, "slots": list(t.slots)})
    items = [
        AllocationView.from_row(
            a, slots=bits(a.slots), awaited=bits(a.awaited), cpus=a.cpus_milli / 1000, tasks=tasks[a.attempt, a.machine]
        )
        for a in found
    ]
    return AllocationList(items=items, next_cursor=following)


def _fields(session: Session, rows: Sequence[Workload], whys: Mapping[str, Why]) -> list[dict[str, Any]]:
    names = list({row.tenant for row in rows})
    levels = dict(session.execute(_LEVELS, {"names": names}).all()) if names else {}
    # Workloads that were never placed have no attempts; in a long queue these are the majority.
    placed = [row.id for row in rows if row.attempt]
    tried = _progress(session, placed)
    waits = waits_of(session, rows)
    specs = {row.id: row.listed if "spec" in inspect(row).unloaded else row.spec for row in rows}
    elastic = [
        row.id for row in rows if row.attempt and any(job.get("most_tasks") for job in specs[row.id].get("jobs", []))
    ]
    sizes = _sizes(session, elastic)
    return [
        {
            "id": row.id,
            "name": row.name,
            "tenant": row.tenant,
            "labels": row.labels,
            "phase": _shown_phase(row, whys[row.id]),
            "reason": whys[row.id].first,
            "attempt": row.attempt,
            "level": max(levels[row.tenant], row.level or 0),
            "held_by": row.held_by,
            "blocked": row.blocked if Phase(row.phase) in QUEUED_PHASES else None,
            "submitted_at": row.submitted_at,
            "waited_s": waits[row.id].waited_s,
            "eligible_s": waits[row.id].eligible_s,
            "finished_at": row.finished_at,
            "region": row.region,
            "checkpoint_region": row.checkpoint_region,
            "checkpoint_store": row.checkpoint_store,
            "queued": _is_queued(row, whys[row.id]),
            "expected_start": start_view(row, whys[row.id].entry),
            **dict(zip(("preemptions", "lost_s", "progress"), tried.get(row.id, (0, 0.0, None)), strict=True)),
            "jobs": [_job(job, sizes.get(row.id, {})) for job in specs[row.id].get("jobs", [])],
            "tables": specs[row.id].get("tables") or [],
            "array": array_view(whys[row.id].array),
            "element": element_view(row, specs[row.id]),
        }
        for row in rows
    ]


def _is_queued(row: Workload, why: Why) -> bool:
    return Phase(row.phase) in QUEUED_PHASES and (why.array is None or why.array.waiting > 0)


def _shown_phase(row: Workload, why: Why) -> str:
    """Returns the phase that users see: an array with elements that were placed is running."""
    has_begun = row.finished_at is None and why.array is not None and why.array.has_begun
    return Phase.RUNNING if has_begun else row.phase


def _sizes(session: Session, ids: Collection[str]) -> dict[str, dict[str, int]]:
    """Returns the number of tasks of each job in the newest attempt, by workload."""
    if not ids:
        return {}
    newest = (Workload.id == Attempt.workload) & (Workload.attempt == Attempt.attempt)
    plans = session.execute(select(Attempt.workload, Attempt.plan).join(Workload, newest).where(Workload.id.in_(ids)))
    return {workload: tasks_of_jobs(plan["jobs"]) for workload, plan in plans}


def _job(job: dict[str, Any], placed: Mapping[str, int]) -> JobView:
    resources = job["resources"]
    return JobView(
        name=job["name"],
        role=job["role"],
        tasks=job["tasks"],
        most_tasks=job.get("most_tasks"),
        placed_tasks=placed.get(job["name"]),
        resources=TaskResourcesView(
            gpus=resources["gpus"],
            gpu_types=resources["gpu_types"],
            cpus=resources["cpus_milli"] / 1000,
            memory_bytes=resources["memory_bytes"],
        ),
    )


def _progress(session: Session, ids: Collection[str]) -> dict[str, tuple[int, float, ProgressView | None]]:
    """Returns by workload its preemptions, the seconds of work that attempts have lost, and its progress.

    The newest step, checkpoint, cadence and load can come from different attempts.
    """
    if not ids:
        return {}
    found = session.execute(_TRIED, {"ids": list(ids)}).all()
    at_risk = _at_risk(session, ids, found[0].now) if found else {}
    return {row.workload: (row.preemptions, row.lost_s, _progress_view(row, at_risk)) for row in found}


def _progress_view(row: Any, at_risk: Mapping[str, float]) -> ProgressView | None:
    if all(value is None for value in (row.step, row.at, row.cadence, row.load, row.failing, row.notice)):
        return None
    return ProgressView(
        step=row.step,
        metrics=row.metrics or {},
        checkpoint_step=row.saved_step,
        checkpoint_at=row.at,
        checkpoint_age_s=None if row.at is None else max(0.0, (row.now - row.at).total_seconds()),
        checkpoint_bytes=row.bytes,
        checkpoint_s=row.held_s,
        checkpoint_write_s=row.write_s,
        cadence=row.cadence,
        load=row.load,
        failing=row.failing,
        notice=row.notice,
        at_risk_s=at_risk.get(row.workload),
    )


def _at_risk(session: Session, ids: Collection[str], now: datetime) -> dict[str, float]:
    """Returns the seconds of work that an interruption now would lose, for workloads whose tasks run."""
    return {a.workload: lost_by(a, now.timestamp()) for a in session.scalars(_RUNNING, {"ids": list(ids)})}
