"""Endpoint for the owner of a lent machine: the workloads on it, their tenants, and the GPU hours that it has given."""

from datetime import datetime
from typing import Any

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import AnyKey, Caller
from api.bodies import JsonOnly
from api.fleet.machines import PATH, find_machine
from api.masking import mask
from api.openapi import refusals
from api.routing import Router
from api.state import StateOf
from api.views import ReasonView, View, reason_view
from domain.ids import machine_id
from domain.slots import bits
from infra.db.lent_machines import NOTHING_GIVEN, given_by
from infra.db.models import Allocation, Attempt, Machine, Workload

router = Router(prefix="/v1/machines", tags=["fleet"], dependencies=[JsonOnly])


class GuestView(View):
    """A workload that holds resources of the machine."""

    workload: str
    name: str
    tenant: str
    attempt: int
    slots: list[int] = Field(description="Indices of the GPU slots that it holds")
    cpus: float
    memory_bytes: int
    since: datetime = Field(description="When the resources were awarded")


class LendingView(View):
    """The lending of a machine: its present workloads, and the GPU hours that it has given."""

    machine: str = Field(examples=["north/alpha/m1"])
    gpu_type: str | None
    gpus: int
    state: str = Field(description="`joining`, `ready` or `lost`")
    takes_work: bool = Field(description="Whether new work can be placed on the machine")
    slots_withheld: list[int] = Field(description="Indices of the slots that the machine's owner has taken back")
    cordon: ReasonView | None = Field(description="Why nothing new is placed here")
    draining: bool
    notice: ReasonView | None = Field(description="The notice that the owner, or the platform, takes the machine back")
    running: list[GuestView] = Field(description="Workloads on the machine that the caller may see")
    given_gpu_h: float = Field(
        description="GPU hours of useful work on the machine: up to the last checkpoint in the store, or the last "
        "step that another machine of the gang has reported"
    )
    given_gpu_h_30d: float = Field(description="`given_gpu_h` of today and of the 30 days (UTC) before")
    held_gpu_h: float = Field(description="GPU hours that workloads held on the machine while it was lent")
    given_since: datetime | None = Field(description="When a workload first held it; null: none ever did")


@router.get(f"{PATH}/lending", summary="Get the contribution of a lent machine", responses=refusals(404))
def get_lending(region: str, cluster: str, machine: str, state: StateOf, caller: AnyKey) -> LendingView:
    """Returns the workloads on a machine and the GPU hours that it has given. The machine's own key can read it."""
    caller.require_machine(machine_id(region, cluster, machine))
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine)
        given = given_by(session, [row.id]).get(row.id, NOTHING_GIVEN)
        all_slots = (1 << row.gpus) - 1
        found = LendingView(
            machine=row.id,
            gpu_type=row.gpu_type,
            gpus=row.gpus,
            state=row.state,
            takes_work=row.state == "ready"
            and row.cordon is None
            and not row.draining
            and (row.gpus == 0 or row.withheld != all_slots),
            slots_withheld=bits(row.withheld & ~row.unfreed),
            cordon=reason_view(row.cordon),
            draining=row.draining,
            notice=reason_view(row.notice),
            running=_guests(session, caller, row),
            given_gpu_h=given.given_gpu_h,
            given_gpu_h_30d=given.given_gpu_h_30d,
            held_gpu_h=given.held_gpu_h,
            given_since=given.since,
        )
        return mask(session, caller, found)


def _guests(session: Session, caller: Caller, row: Machine) -> list[GuestView]:
    wanted: Any = (
        select(Allocation, Workload.name, Workload.tenant)
        .join(Workload, Workload.id == Allocation.workload)
        # Without what is booked for later attempts.
        .join(Attempt, (Attempt.workload == Allocation.workload) & (Attempt.attempt == Allocation.attempt))
        .where(Allocation.machine == row.id, Allocation.released_at.is_(None))
        .order_by(Allocation.awarded_at, Allocation.workload)
    )
    if caller.tenant is not None:
        wanted = wanted.where(Workload.tenant == caller.tenant)
    return [
        GuestView(
            workload=held.workload,
            name=name,
            tenant=tenant,
            attempt=held.attempt,
            slots=bits(held.slots),
            cpus=held.cpus_milli / 1000,
            memory_bytes=held.memory_bytes,
            since=held.awarded_at,
        )
        for held, name, tenant in session.execute(wanted)
    ]
