"""Endpoints for tenants: their levels, quotas and current usage."""

from typing import Annotated

from pydantic import Field
from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from api.auth import Operator, Viewer
from api.bodies import Body, JsonOnly, Name
from api.openapi import refusals
from api.paging import MAX_ITEMS, Cursor, Limit, Page, page
from api.problems import HttpProblem, ProblemType, existing
from api.routing import Router
from api.state import StateOf
from api.views import ResourcesView, View, write_audit
from domain.isolation import Isolation
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from infra.db import events, outbox
from infra.db.capacity import PoolRow
from infra.db.models import Attempt, Workload
from infra.db.own_machines import forget_own, machines_of
from infra.db.tenants import ApiKey, Archive, ArchivePart, Secret, Tenant

router = Router(prefix="/v1/tenants", tags=["tenants"], dependencies=[JsonOnly])
_MOST = 10**9

GpuType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class Quota(Body):
    """GPU slots by type, and CPUs in cores. An absent type has a quota of 0; null CPUs means no limit."""

    gpus: dict[GpuType, Annotated[int, Field(ge=0, le=_MOST, strict=True)]] = Field(
        default_factory=dict, max_length=1000, examples=[{"a100": 8}]
    )
    cpus: Annotated[float, Field(ge=0, le=_MOST)] | None = None


class TenantBody(Body):
    """The level and quota of a tenant."""

    level: int = Field(ge=HIGHEST_LEVEL, le=LOWEST_LEVEL, strict=True, description="1 is the highest", examples=[3])
    quota: Quota = Quota()
    isolation: Isolation | None = Field(
        None, description="The weakest isolation of tasks on machines that run its workloads; null: any"
    )


class TenantView(View):
    """A tenant with its level, quota and current usage."""

    name: str
    level: int = Field(description="1 is the highest, 7 the lowest")
    quota: ResourcesView
    used: ResourcesView
    isolation: str | None = Field(description="The weakest isolation of tasks that it requires; null: any")


class TenantList(Page[TenantView]):
    """A page of tenants, sorted by name."""


@router.get("", summary="List tenants")
def list_tenants(state: StateOf, caller: Viewer, limit: Limit = MAX_ITEMS, cursor: Cursor = None) -> TenantList:
    """Lists all tenants. A key with a tenant gets only that tenant."""
    with state.transaction() as session:
        wanted = select(Tenant).order_by(Tenant.name).limit(limit + 1)
        if cursor is not None:
            wanted = wanted.where(Tenant.name > cursor)
        if caller.tenant is not None:
            wanted = wanted.where(Tenant.name == caller.tenant)
        rows, following = page(session.scalars(wanted).all(), limit, lambda row: row.name)
        used = _used(session)
        return TenantList(items=[_view(row, used) for row in rows], next_cursor=following)


@router.get("/{name}", summary="Get a tenant", responses=refusals(404))
def get_tenant(name: str, state: StateOf, caller: Viewer) -> TenantView:
    """Returns one tenant."""
    caller.require_tenant(name)
    with state.transaction() as session:
        return _view(existing(session, Tenant, name, "tenant"), _used(session))


@router.put("/{name}", summary="Create or replace a tenant", responses=refusals(409))
def put_tenant(name: Name, body: TenantBody, state: StateOf, caller: Operator) -> TenantView:
    """Creates a tenant, or replaces its level and quota. Running workloads continue; the next scan applies it."""
    with state.transaction() as session:
        row = session.get(Tenant, name, with_for_update=True)
        action = "tenant.change"
        if row is None:
            _refuse_second(session, state.settings.api.one_tenant)
            row = Tenant(name=name)
            session.add(row)
            action = "tenant.create"
        cpus = body.quota.cpus
        row.level = body.level
        row.quota_gpus = dict(body.quota.gpus)
        row.quota_cpus_milli = None if cpus is None else round(cpus * 1000)
        row.isolation = body.isolation
        session.flush()
        said = body.model_dump(mode="json")
        events.record(session, "tenant.changed", tenant=name, detail={"by": caller.id, **said})
        write_audit(session, caller, action, name, tenant=name, **said)
        outbox.wake_scheduler(session)
        return _view(row, _used(session))


@router.delete("/{name}", status_code=204, summary="Delete a tenant", responses=refusals(404, 409))
def delete_tenant(name: str, state: StateOf, caller: Operator) -> None:
    """Deletes a tenant with its secrets and archives. Refused while it has workloads or valid keys."""
    with state.transaction() as session:
        row = existing(session, Tenant, name, "tenant")
        workloads = session.scalar(select(func.count()).where(Workload.tenant == name))
        keys = session.scalar(select(func.count()).where(ApiKey.tenant == name, ApiKey.is_good()))
        if workloads or keys:
            raise HttpProblem(
                ProblemType.CONFLICT,
                f"tenant {name} still has workloads ({workloads}, including recently ended ones) or API keys ({keys})",
            )
        if own := session.scalars(machines_of(name)).all():
            raise HttpProblem(ProblemType.CONFLICT, f"tenant {name} still has {len(own)} pilots, such as {own[0]}")
        serving = select(PoolRow.region + "/" + PoolRow.name).where(PoolRow.tenants.contains([name]))
        if pools := session.scalars(serving).all():
            detail = f"tenant {name} is in `tenants` of the pools {', '.join(sorted(pools))}"
            raise HttpProblem(ProblemType.CONFLICT, detail)
        forget_own(session, name)
        for kind in (ApiKey, Secret, Archive, ArchivePart):
            session.execute(delete(kind).where(kind.tenant == name))
        session.delete(row)
        write_audit(session, caller, "tenant.delete", name, tenant=name)
        outbox.wake_scheduler(session)


def _refuse_second(session: Session, why: str | None) -> None:
    """Raises 409 if a tenant exists and tasks of tenants cannot be separated (`why`, `ApiSettings.one_tenant`)."""
    if why is None:
        return
    session.execute(text("lock table tenant in share row exclusive mode"))  # Two requests must not both find none.
    other = session.scalar(select(Tenant.name).limit(1))
    if other is not None:
        detail = f"a second tenant beside {other} is refused: {why}"
        raise HttpProblem(ProblemType.CONFLICT, f"{detail}; if tenants trust each other: mizzen up --trust-tenants")


def tenant_names(session: Session) -> list[str]:
    """Returns the names of all tenants, sorted."""
    return list(session.scalars(select(Tenant.name).order_by(Tenant.name)))


def _used(session: Session) -> dict[str, ResourcesView]:
    """Returns the resources that live attempts hold, by tenant."""
    live = Attempt.released_at.is_(None)
    joined = select(Workload.tenant, func.sum(Attempt.cpus_milli)).join(Attempt, Attempt.workload == Workload.id)
    cpus = session.execute(joined.where(live).group_by(Workload.tenant)).all()
    gpus: dict[str, dict[str, int]] = {}
    for tenant, gpu_type, slots in session.execute(
        text(
            "select w.tenant, g.key, sum(g.value::bigint) from attempt as a join workload as w on w.id = a.workload,"
            " jsonb_each_text(a.gpu_types) as g where a.released_at is null group by w.tenant, g.key order by g.key"
        )
    ):
        gpus.setdefault(tenant, {})[gpu_type] = int(slots)
    return {tenant: ResourcesView(gpus=gpus.get(tenant, {}), cpus=float(milli) / 1000) for tenant, milli in cpus}


def _view(row: Tenant, used: dict[str, ResourcesView]) -> TenantView:
    cpus = row.quota_cpus_milli
    return TenantView(
        name=row.name,
        level=row.level,
        quota=ResourcesView(gpus=row.quota_gpus, cpus=None if cpus is None else cpus / 1000),
        used=used.get(row.name, ResourcesView(gpus={}, cpus=0.0)),
        isolation=row.isolation,
    )
