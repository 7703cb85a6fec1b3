"""Endpoints for machines: their state and held slots, and cordon, drain and key trust."""

from datetime import datetime
from typing import Annotated

from fastapi import Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import AnyKey, Caller, Operator, Viewer
from api.bodies import Body, JsonOnly, Line
from api.masking import mask
from api.openapi import refusals
from api.paging import Page
from api.problems import HttpProblem, ProblemType, not_found
from api.routing import Router
from api.state import StateOf
from api.views import ReasonView, View, reason_view, write_audit
from domain.ids import machine_id
from domain.reasons import Reason, ReasonCode
from domain.slots import bits
from infra.db import drains, events, outbox
from infra.db.models import Allocation, Machine, Workload
from infra.keys import key_fingerprint

router = Router(prefix="/v1/machines", tags=["fleet"], dependencies=[JsonOnly])
PATH = "/{region}/{cluster}/{machine}"


class CordonBody(Body):
    """An operator's note on why a machine is cordoned or drained."""

    reason: Line | None = None


class TrustBody(Body):
    """The machine key that an operator trusts."""

    key: Line | None = Field(None, description="Fingerprint of the key; default: the key that the machine now offers")


class MachineView(View):
    """A machine with its state, and its held and promised slots."""

    id: str = Field(examples=["north/alpha/m1"])
    region: str
    cluster: str
    machine: str
    rack: str
    gpu_type: str | None
    gpus: int
    slots_held: list[int] = Field(description="Indices of the held slots")
    slots_promised: list[int] = Field(
        description="Indices of the slots that are held by a workload that is being evicted, and promised to another"
    )
    slots_withheld: list[int] = Field(
        description="Indices of the slots that get no new work: the owner has taken them back, or they are unfreed"
    )
    slots_unfreed: list[int] = Field(
        description="Indices of unfreed slots: their GPU memory was not freed at the end of a workload"
    )
    cpus: float
    free_cpus: float
    memory_bytes: int
    free_memory_bytes: int
    state: str = Field(description="`joining`, `ready` or `lost`")
    cordon: ReasonView | None = Field(description="Why nothing new is placed here")
    draining: bool
    pool: str = Field(description="Its pool; empty: none")
    next_pool: str | None = Field(description="The pool that it moves to; null: it does not move")
    failed_gangs: int = Field(description="Number of consecutive workloads that lost tasks or failed to start here")
    isolation: str = Field(description="How tasks are separated: `none`, `user` or `sandbox`", examples=["sandbox"])
    isolation_why: str | None = Field(
        description="Why no stronger mode is used; null: the mode is the strongest one, or was set"
    )
    engine: str | None = Field(
        description="Kind and version of its container engine, for jobs with an image; null: none",
        examples=["docker 28.1.1"],
    )
    address: str
    key: str = Field(description="Fingerprint of its public key")
    offered_key: str | None = Field(description="Fingerprint of another key that the machine offers, not trusted yet")
    registered_at: datetime
    lost_at: datetime | None


class MachineDetail(MachineView):
    """A machine with the workloads on it that the caller may see."""

    workloads: list[str]


class MachinePage(Page[MachineView]):
    """A page of machines, sorted by id."""


@router.get("", summary="List machines")
def list_machines(
    state: StateOf,
    caller: Viewer,
    region: Annotated[str | None, Query(description="Only machines in this region")] = None,
    cluster: Annotated[str | None, Query(description="Only machines of clusters with this name")] = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    cursor: Annotated[str | None, Query(max_length=300, description="`next_cursor` of the previous page")] = None,
) -> MachinePage:
    """Lists machines, sorted by id."""
    wanted = select(Machine).order_by(Machine.id).limit(limit + 1)
    if region is not None:
        wanted = wanted.where(Machine.region == region)
    if cluster is not None:
        wanted = wanted.where(Machine.cluster == cluster)
    if cursor is not None:
        wanted = wanted.where(Machine.id > cursor)
    with state.transaction() as session:
        rows = session.scalars(wanted).all()
        more = rows[limit - 1].id if len(rows) > limit else None
        found = MachinePage(items=[MachineView.from_row(row, **_fields(row)) for row in rows[:limit]], next_cursor=more)
        return mask(session, caller, found)


@router.get(PATH, summary="Get a machine", responses=refusals(404))
def get_machine(region: str, cluster: str, machine: str, state: StateOf, caller: AnyKey) -> MachineDetail:
    """Returns one machine with the workloads on it. The machine's own key can read it."""
    caller.require_machine(machine_id(region, cluster, machine))
    with state.transaction() as session:
        return _detail(session, caller, find_machine(session, region, cluster, machine))


@router.post(f"{PATH}/cordon", summary="Cordon a machine", responses=refusals(404))
def cordon(
    region: str, cluster: str, machine: str, state: StateOf, caller: Operator, body: CordonBody | None = None
) -> MachineDetail:
    """Cordons a machine: no new workloads are placed on it. Running workloads continue."""
    note = body.reason if body is not None else None
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        reason = _cordoned_by(caller, note)
        row.cordon = reason.to_json()
        _record(session, caller, row, "machine.cordoned", "machine.cordon", reason)
        return _detail(session, caller, row)


@router.post(f"{PATH}/uncordon", summary="Uncordon a machine", responses=refusals(404))
def uncordon(region: str, cluster: str, machine: str, state: StateOf, caller: Operator) -> MachineDetail:
    """Removes the cordon of a machine and resets its count of failed gangs. A drain stays in effect."""
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        if row.cordon is not None or row.failed_gangs:
            row.cordon = None
            row.failed_gangs, row.failed_workloads, row.failed_at = 0, [], None
            _record(session, caller, row, "machine.uncordoned", "machine.uncordon", None)
        return _detail(session, caller, row)


@router.post(f"{PATH}/drain", summary="Drain a machine", responses=refusals(404))
def drain(
    region: str, cluster: str, machine: str, state: StateOf, caller: Operator, body: CordonBody | None = None
) -> MachineDetail:
    """Cordons a machine. Workloads that run on it save a checkpoint and return to the queue."""
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        reason = _cordoned_by(caller, body.reason if body is not None else None)
        drains.drain(session, row, reason, caller.id)
        _record(session, caller, row, "machine.draining", "machine.drain", reason)
        return _detail(session, caller, row)


@router.post(f"{PATH}/undrain", summary="Undrain a machine", responses=refusals(404))
def undrain(region: str, cluster: str, machine: str, state: StateOf, caller: Operator) -> MachineDetail:
    """Ends a drain and the operator's cordon. A cordon that mizzen set stays until `uncordon`."""
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        if row.draining:
            row.draining = False
            if row.cordon is not None and row.cordon.get("code") == ReasonCode.CORDONED_BY_OPERATOR:
                row.cordon = None
            _record(session, caller, row, "machine.undrained", "machine.undrain", None)
        return _detail(session, caller, row)


@router.post(f"{PATH}/trust", summary="Trust a machine's new key", responses=refusals(404, 409))
def trust(
    region: str, cluster: str, machine: str, state: StateOf, caller: Operator, body: TrustBody | None = None
) -> MachineDetail:
    """Accepts the key that a machine now offers; from then on secrets are sealed for this key.

    The machine is used again after its agent's next registration, within 30 seconds.
    """
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        offered = row.offered_key
        if offered is None:
            raise HttpProblem(
                ProblemType.CONFLICT, f"machine {row.id} offers no new key: it registers with its pinned key"
            )
        if body is not None and body.key is not None and body.key != key_fingerprint(offered):
            message = f"the key that machine {row.id} offers is {key_fingerprint(offered)}"
            raise HttpProblem(ProblemType.CONFLICT, message)
        row.public_key, row.offered_key, row.offered_at = offered, None, None
        if row.cordon is not None and row.cordon.get("code") == ReasonCode.KEY_NOT_TRUSTED:
            row.cordon = None
        _record(session, caller, row, "machine.key_changed", "machine.trust", None)
        return _detail(session, caller, row)


def _cordoned_by(caller: Caller, note: str | None) -> Reason:
    return Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": caller.id} | ({"note": note} if note else {}))


def find_machine(session: Session, region: str, cluster: str, machine: str, *, lock: bool = False) -> Machine:
    """Returns the row of a machine. `lock`: lock the row for update.

    Raises:
        Problem: 404, the machine does not exist.
    """
    # A part with a slash could form the id of another machine, so only ids with exactly two slashes are looked up.
    name = machine_id(region, cluster, machine)
    row = session.get(Machine, name, with_for_update=lock) if name.count("/") == 2 else None
    if row is None:
        raise not_found("machine", name)
    return row


def _record(session: Session, caller: Caller, row: Machine, kind: str, action: str, reason: Reason | None) -> None:
    events.record(session, kind, region=row.region, machine=row.id, reason=reason, detail={"by": caller.id})
    note = reason.detail.get("note") if reason is not None else None
    write_audit(session, caller, action, row.id, note=note)
    outbox.wake_scheduler(session)


def _detail(session: Session, caller: Caller, row: Machine) -> MachineDetail:
    session.flush()
    live = (
        select(Workload.id)
        .join(Allocation, Allocation.workload == Workload.id)
        .where(Allocation.machine == row.id, Allocation.released_at.is_(None))
        .distinct()  # A workload may hold slots and have booked others for its next attempt.
    )
    if caller.tenant is not None:
        live = live.where(Workload.tenant == caller.tenant)
    workloads = session.scalars(live.order_by(Workload.id)).all()
    return mask(session, caller, MachineDetail.from_row(row, **_fields(row), workloads=list(workloads)))


def _fields(row: Machine) -> dict[str, object]:
    """Returns the fields of a view that differ from the row's columns."""
    return {
        "machine": row.id.rpartition("/")[2],
        "slots_held": bits(row.held),
        "slots_promised": bits(row.promised),
        "slots_withheld": bits(row.withheld),
        "slots_unfreed": bits(row.unfreed),
        "cpus": row.cpus_milli / 1000,
        "free_cpus": row.free_cpus_milli / 1000,
        "cordon": reason_view(row.cordon),
        "key": key_fingerprint(row.public_key),
        "offered_key": None if row.offered_key is None else key_fingerprint(row.offered_key),
    }
