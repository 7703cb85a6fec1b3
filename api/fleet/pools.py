"""Endpoints for pools, which define how many machines to launch from which offers."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Query
from pydantic import Field, StringConstraints
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from api.auth import Operator, Viewer
from api.bodies import MAX_TEXT, Body, JsonOnly, Line, Name
from api.openapi import refusals
from api.problems import existing, invalid, not_found
from api.routing import Router
from api.state import StateOf
from api.views import ReasonView, View, reason_view, write_audit
from capacity.pools import wrong_size
from domain.capacity import CapacityKind
from domain.ids import NAME_PATTERN
from infra.db import events, outbox
from infra.db.capacity import IDLE_S, InstanceRow, PoolRow
from infra.db.models import Region
from infra.db.tenants import Tenant

router = Router(prefix="/v1/pools", tags=["fleet"])
PoolName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=20)]
"""Limited to 20 characters, because the names of the pool's clusters begin with it."""
_MOST_MACHINES = 10_000
_MOST_GPUS = 100_000_000
_MOST_USD_PER_H = 1e6
_MOST_S = 1e9
_Texts = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]], Field(max_length=100)]


class PoolBody(Body):
    """Settings of a pool. Omitted fields are not changed; a new pool accepts any offer and has size 0."""

    size: Annotated[int, Field(ge=0, le=_MOST_MACHINES, strict=True)] | None = Field(
        None, description="Number of machines; the minimum, if the pool can grow"
    )
    max_size: Annotated[int, Field(ge=0, le=_MOST_MACHINES, strict=True)] | None = Field(
        None, description="Maximum number of machines that are launched for waiting workloads; null: it does not grow"
    )
    idle_s: Annotated[float, Field(ge=0, le=_MOST_S)] | None = Field(
        None, description="A machine above `size` is ended after this idle time"
    )
    buffer: Annotated[int, Field(ge=0, le=_MOST_MACHINES, strict=True)] | None = Field(
        None, description="In a pool that grows: number of idle machines to keep for future workloads"
    )
    providers: _Texts | None = Field(None, description="Names of the allowed providers; empty: any")
    zones: _Texts | None = Field(None, description="Allowed zones; empty: any")
    kinds: Annotated[list[CapacityKind], Field(max_length=4)] | None = Field(
        None, description="Allowed capacity kinds; empty: any"
    )
    machine_types: _Texts | None = Field(None, description="Allowed machine types; empty: any")
    max_usd_per_h: Annotated[float, Field(ge=0, le=_MOST_USD_PER_H)] | None = Field(
        None, description="Maximum price of one machine in US dollars an hour; null: any price"
    )
    tenants: Annotated[list[Name], Field(max_length=100)] | None = Field(
        None, description="The tenants whose workloads may use the pool's machines, before others; empty: any tenant"
    )
    gpus: (
        Annotated[dict[Name, Annotated[int, Field(ge=0, le=_MOST_GPUS, strict=True)]], Field(max_length=100)] | None
    ) = Field(None, description="Intended GPUs by GPU type, for plans of pools; replaces all", examples=[{"a100": 512}])
    failure_buffer: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Plans of pools: share of `gpus` that is added because single machines fail"
    )
    survives_loss: bool | None = Field(
        None, description="Plans of pools: whether `gpus` and buffer must remain when any one fault domain is lost"
    )
    max_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Plans of pools: the highest share of what is needed that counts of one fault domain"
    )


_SETTINGS = PoolBody.model_fields
"""A view describes the settings in the same words."""


class PoolView(View):
    """A pool with its settings and its instances."""

    region: str
    name: str
    size: int = Field(description=_SETTINGS["size"].description)
    max_size: int | None = Field(description=_SETTINGS["max_size"].description)
    idle_s: float = Field(description=_SETTINGS["idle_s"].description)
    buffer: int = Field(description=_SETTINGS["buffer"].description)
    providers: list[str] = Field(description=_SETTINGS["providers"].description)
    zones: list[str] = Field(description=_SETTINGS["zones"].description)
    kinds: list[CapacityKind] = Field(description=_SETTINGS["kinds"].description)
    machine_types: list[str] = Field(description=_SETTINGS["machine_types"].description)
    max_usd_per_h: float | None = Field(description=_SETTINGS["max_usd_per_h"].description)
    tenants: list[str] = Field(description=_SETTINGS["tenants"].description)
    gpus: dict[str, int] = Field(description=_SETTINGS["gpus"].description)
    failure_buffer: float = Field(description=_SETTINGS["failure_buffer"].description)
    survives_loss: bool = Field(description=_SETTINGS["survives_loss"].description)
    max_share: float = Field(description=_SETTINGS["max_share"].description)
    instances: dict[str, int] = Field(description="Number of instances by phase", examples=[{"ready": 2, "joining": 1}])
    usd_per_h: float = Field(description="Price of all its launched machines, in US dollars an hour")
    reason: ReasonView | None = Field(
        description="Why it has fewer machines than its size or buffer, although none is being launched"
    )


class PoolList(View):
    """All pools, sorted by region and name."""

    items: list[PoolView]


@router.get("", summary="List pools")
def list_pools(
    state: StateOf, _: Viewer, region: Annotated[Line | None, Query(description="Only pools in this region")] = None
) -> PoolList:
    """Lists all pools, sorted by region and name."""
    wanted = select(PoolRow).order_by(PoolRow.region, PoolRow.name)
    if region is not None:
        wanted = wanted.where(PoolRow.region == region)
    with state.transaction() as session:
        return PoolList(items=_views(session, session.scalars(wanted).all()))


@router.put("/{region}/{name}", summary="Create or change a pool", dependencies=[JsonOnly], responses=refusals(404))
def set_pool(region: str, name: PoolName, body: PoolBody, state: StateOf, caller: Operator) -> PoolView:
    """Creates a pool or changes the given settings. Missing machines are launched, excess ones drained and ended."""
    changed = body.model_dump(mode="json", include=body.model_fields_set)
    for field, value in changed.items():
        if value is None and field not in ("max_usd_per_h", "max_size"):
            raise invalid(field, "must not be null; omit it to keep the current value")
    with state.transaction() as session:
        existing(session, Region, region, "region")
        row = session.get(PoolRow, (region, name), with_for_update=True)
        if row is None:
            row = PoolRow(
                region=region, name=name, size=0, providers=[], zones=[], kinds=[], machine_types=[], idle_s=IDLE_S,
                buffer=0, tenants=[], gpus={}, failure_buffer=0.0, survives_loss=True, max_share=1.0,
            )  # fmt: skip
            session.add(row)
        for at, tenant in enumerate(changed.get("tenants", [])):
            if session.get(Tenant, tenant, with_for_update={"read": True}) is None:
                raise invalid(f"tenants[{at}]", f"tenant {tenant} does not exist; `mizzen tenants` lists them")
        for field, value in changed.items():
            setattr(row, field, {k: v for k, v in value.items() if v} if field == "gpus" else value)
        if (wrong := wrong_size(row.size, row.max_size, row.buffer)) is not None:
            raise invalid(*wrong)
        write_audit(session, caller, "pool.set", f"{region}/{name}", **changed)
        events.record(session, "pool.set", region=region, detail={"pool": name, "by": caller.id, **changed})
        session.flush()
        outbox.wake_scheduler(session)
        return _views(session, [row])[0]


@router.delete("/{region}/{name}", status_code=204, summary="Remove a pool", responses=refusals(404))
def remove_pool(region: str, name: str, state: StateOf, caller: Operator) -> None:
    """Removes a pool. Its machines are drained and ended."""
    with state.transaction() as session:
        gone = delete(PoolRow).where(PoolRow.region == region, PoolRow.name == name).returning(PoolRow.name)
        if session.scalar(gone) is None:
            raise not_found("pool", f"{region}/{name}")
        write_audit(session, caller, "pool.remove", f"{region}/{name}")
        events.record(session, "pool.removed", region=region, detail={"pool": name, "by": caller.id})


def _views(session: Session, rows: Sequence[PoolRow]) -> list[PoolView]:
    counted = (
        select(
            InstanceRow.region,
            InstanceRow.pool,
            InstanceRow.phase,
            func.count(),
            func.coalesce(func.sum(InstanceRow.usd_per_h).filter(InstanceRow.started_at.is_not(None)), 0.0),
        )
        .where(InstanceRow.gone_at.is_(None))
        .group_by(InstanceRow.region, InstanceRow.pool, InstanceRow.phase)
    )
    counts: dict[tuple[str, str], dict[str, int]] = {}
    usd_per_h: dict[tuple[str, str], float] = {}
    for region, pool, phase, count, usd in session.execute(counted):
        counts.setdefault((region, pool), {})[phase] = count
        usd_per_h[region, pool] = usd_per_h.get((region, pool), 0.0) + usd
    return [
        PoolView.from_row(
            row,
            instances=counts.get((row.region, row.name), {}),
            usd_per_h=usd_per_h.get((row.region, row.name), 0.0),
            reason=reason_view(row.reason),
        )
        for row in rows
    ]
