"""Endpoints for pilots: machines for only one tenant, which started them as jobs of a Slurm cluster.

Each pilot has a machine's key, with which its agent connects to the gateway; it needs no other credentials.
"""

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Submitter
from api.bodies import Body, JsonOnly, Name
from api.data.archives import TenantOf, owner_of
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, existing, not_found
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from domain.ids import machine_id
from infra.db.models import Machine, Region
from infra.db.own_machines import own_cluster, pilots_of
from infra.db.tenants import ApiKey, Tenant
from infra.keys import new_api_key

router = Router(prefix="/v1/pilots", tags=["fleet"], dependencies=[JsonOnly])
PATH = "/{region}/{name}"
_MOST = 1000
"""Maximum number of pilots of a tenant."""
_LONGEST_S = 60 * 86400
_SAVING_S = 600
"""How long the key of a stopped pilot still works, so that its tasks can save, in seconds."""


class PilotBody(Body):
    """The lifetime of a pilot's key."""

    expires_in_s: Annotated[int, Field(ge=60, le=_LONGEST_S, strict=True)] = Field(
        description="Lifetime of the key from now: the time in the cluster's queue and that of the job",
        examples=[86400],
    )


class PilotView(View):
    """A pilot: a machine that only one tenant may use."""

    machine: str = Field(description="Id of the machine", examples=["campus/own-3/pilot-1"])
    created_at: datetime
    expires_at: datetime | None = Field(description="When its key expires")
    state: str | None = Field(description="State of the machine; null: its agent has not joined")
    isolation: str | None = Field(description="How its tasks are separated; null: its agent has not joined")
    isolation_why: str | None = Field(description="Why no stronger mode is used")


class NewPilotView(PilotView):
    """A new pilot, with the settings that its agent needs. The key is returned only in this response."""

    bucket_url: str = Field(description="The region's bucket")
    key: Annotated[str, Field(json_schema_extra={"readOnly": True})]


class PilotList(View):
    """A tenant's pilots, sorted by id."""

    items: list[PilotView]


@router.get("", summary="List pilots", responses=refusals(404))
def list_pilots(state: StateOf, caller: Submitter, tenant: TenantOf = None) -> PilotList:
    """Lists a tenant's pilots, without those whose key expired more than a day ago."""
    owner = owner_of(caller, tenant)
    with state.transaction() as session:
        return PilotList(items=[_view(key, machine) for key, machine in session.execute(pilots_of(owner))])


@router.put(PATH, summary="Create a pilot's key", responses=refusals(404, 409))
def put_pilot(
    region: str, name: Name, body: PilotBody, state: StateOf, caller: Submitter, tenant: TenantOf = None
) -> NewPilotView:
    """Creates a key with which one agent joins as a machine of the tenant. A repeated request replaces the key."""
    owner = owner_of(caller, tenant)
    with state.transaction() as session:
        home = existing(session, Region, region, "region")
        row = existing(session, Tenant, owner, "tenant")
        cluster = own_cluster(session, region, row)
        if cluster is None:
            raise HttpProblem(ProblemType.CONFLICT, f"region {region}: cluster own-{row.number} is not the tenant's")
        machine = machine_id(region, cluster, name)
        there = {key.machine: key for key, _ in session.execute(pilots_of(owner))}
        if len(there) >= _MOST and machine not in there:
            raise HttpProblem(ProblemType.CONFLICT, f"tenant {owner} has {_MOST} pilots, the maximum; stop some")
        if (before := there.get(machine)) is not None:
            session.delete(before)
        key_id, key, digest = new_api_key()
        expires_at = func.now() + timedelta(seconds=body.expires_in_s)
        made = ApiKey(
            id=key_id, sha256=digest, role="machine", machine=machine, label=f"pilot of {owner}", expires_at=expires_at
        )
        session.add(made)
        session.flush()
        session.refresh(made)
        write_audit(session, caller, "pilot.create", machine, tenant=owner, expires_in_s=body.expires_in_s)
        shown = _view(made, session.get(Machine, machine)).model_dump()
        return NewPilotView(**shown, bucket_url=home.bucket_url, key=key)


@router.delete(PATH, status_code=204, summary="Stop a pilot", responses=refusals(404))
def stop_pilot(region: str, name: str, state: StateOf, caller: Submitter, tenant: TenantOf = None) -> None:
    """Ends a pilot's key: at once if its agent has not joined or is lost, else in ten minutes, so that tasks save."""
    owner = owner_of(caller, tenant)
    with state.transaction() as session:
        key, machine = _find(session, owner, region, name)
        if machine is None or machine.state == "lost":
            session.delete(key)
        else:
            key.expires_at = func.least(key.expires_at, func.now() + timedelta(seconds=_SAVING_S))
        write_audit(session, caller, "pilot.stop", str(key.machine), tenant=owner)


def _find(session: Session, owner: str, region: str, name: str) -> tuple[ApiKey, Machine | None]:
    number = session.scalar(select(Tenant.number).where(Tenant.name == owner))
    machine = machine_id(region, f"own-{number}", name)
    found = session.execute(pilots_of(owner).where(ApiKey.machine == machine)).one_or_none()
    if found is None:
        raise not_found("pilot", f"{region}/{name}")
    return found[0], found[1]


def _view(key: ApiKey, machine: Machine | None) -> PilotView:
    return PilotView(
        machine=str(key.machine),
        created_at=key.created_at,
        expires_at=key.expires_at,
        state=None if machine is None else machine.state,
        isolation=None if machine is None else machine.isolation,
        isolation_why=None if machine is None else machine.isolation_why,
    )
