"""Endpoints for API keys, and for the identity of the caller."""

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import AnyKey, Operator, Role
from api.bodies import Body, JsonOnly, Line, MachineId, Name
from api.openapi import refusals
from api.paging import MAX_ITEMS, Cursor, Limit, Page, page
from api.problems import HttpProblem, ProblemType, existing, invalid, not_found
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from domain.capacity import CapacityKind
from infra.db.models import Cluster, Region
from infra.db.tenants import ApiKey, Tenant
from infra.keys import new_api_key

_LONGEST_S = 10 * 366 * 86400
router = Router(prefix="/v1", tags=["tenants"], dependencies=[JsonOnly])
open_router = Router()
LOGIN_PATH = "/.well-known/mizzen-login"
"""Path of the settings of `mizzen login`."""


class KeyBody(Body):
    """A new key.

    An operator's key has no tenant, a submitter's key needs one, for a viewer's or a balancer's key it is optional. A
    machine's key has a machine instead.
    """

    role: Role
    tenant: Name | None = None
    machine: MachineId | None = Field(
        None,
        description="For a machine's key: id of the machine, which need not have joined yet",
        examples=["north/alpha/m1"],
    )
    label: Line = ""
    person: Annotated[Line, Field(min_length=1)] | None = Field(
        None,
        description="Who submits with the key; keys with the same person share one place among the people of a tenant."
        " The person of a token of an OIDC issuer is `oidc:` and its subject. null: the key is a person of its own",
        examples=["oidc:alice@example.org"],
    )
    expires_in_s: Annotated[int, Field(ge=1, le=_LONGEST_S, strict=True)] | None = Field(
        None, description="Lifetime from now; null: the key does not expire", examples=[7776000]
    )


class KeyView(View):
    """An API key, without the key itself."""

    id: str
    role: Role
    tenant: str | None
    machine: str | None
    label: str
    person: str | None
    created_at: datetime
    revoked_at: datetime | None
    expires_at: datetime | None


class NewKeyView(KeyView):
    """A new API key. The key itself is returned only in this response; the server stores only its hash."""

    key: Annotated[str, Field(json_schema_extra={"readOnly": True})]


class KeyList(Page[KeyView]):
    """A page of keys, sorted by id."""


class IdentityView(View):
    """The identity of the caller: the key of the request."""

    id: str
    role: Role
    tenant: str | None
    machine: str | None
    label: str
    expires_at: datetime | None


@router.get("/whoami", summary="Get the caller's identity")
async def whoami(caller: AnyKey) -> IdentityView:
    """Returns the id, role, tenant, machine, label and expiry of the key that is used."""
    return IdentityView.from_row(caller)


@open_router.get(LOGIN_PATH, include_in_schema=False)
async def login_settings(state: StateOf) -> dict[str, str]:
    """Returns the settings of the device flow for `mizzen login`. It needs no key."""
    oidc = state.settings.api.oidc
    if oidc is None or oidc.client_id is None:
        raise not_found("issuer", "for `mizzen login`")
    return {"issuer": oidc.issuer, "client_id": oidc.client_id, "scope": oidc.scope, "token": oidc.token}


@router.get("/keys", summary="List API keys")
def list_keys(state: StateOf, _: Operator, limit: Limit = MAX_ITEMS, cursor: Cursor = None) -> KeyList:
    """Lists all keys, including revoked ones."""
    wanted = select(ApiKey).order_by(ApiKey.id).limit(limit + 1)
    if cursor is not None:
        wanted = wanted.where(ApiKey.id > cursor)
    with state.transaction() as session:
        rows, following = page(session.scalars(wanted).all(), limit, lambda row: row.id)
        return KeyList(items=[KeyView.from_row(row) for row in rows], next_cursor=following)


@router.get("/keys/{id}", summary="Get an API key", responses=refusals(404))
def get_key(id: str, state: StateOf, _: Operator) -> KeyView:
    """Returns one key."""
    with state.transaction() as session:
        row = existing(session, ApiKey, id, "API key")
        return KeyView.from_row(row)


@router.post("/keys", status_code=201, summary="Create an API key")
def create_key(body: KeyBody, state: StateOf, caller: Operator) -> NewKeyView:
    """Creates a key. The key itself is returned only in this response.

    If the cluster of a machine's key does not exist, it is created with the capacity kind `voluntary`.
    """
    if body.role is Role.OPERATOR and body.tenant is not None:
        raise invalid("tenant", "must be omitted for an operator's key", body.tenant)
    if body.role is Role.SUBMITTER and body.tenant is None:
        raise invalid("tenant", "is required for a submitter's key")
    if body.role is Role.MACHINE and body.tenant is not None:
        raise invalid("tenant", "must be omitted for a machine's key", body.tenant)
    if (body.role is Role.MACHINE) != (body.machine is not None):
        raise invalid("machine", "is required for a machine's key, and must be omitted for others", body.machine)
    if body.role not in (Role.SUBMITTER, Role.OPERATOR) and body.person is not None:
        raise invalid("person", f"must be omitted for a {body.role}'s key, which submits nothing", body.person)
    key_id, key, digest = new_api_key()
    with state.transaction() as session:
        if body.tenant is not None and session.get(Tenant, body.tenant) is None:
            raise invalid("tenant", "this tenant does not exist", body.tenant)
        if body.machine is not None:
            _ensure_cluster(session, body.machine)
        lifetime = None if body.expires_in_s is None else func.now() + timedelta(seconds=body.expires_in_s)
        row = ApiKey(
            id=key_id,
            sha256=digest,
            role=body.role.value,
            tenant=body.tenant,
            machine=body.machine,
            label=body.label,
            person=body.person,
            expires_at=lifetime,
        )
        session.add(row)
        session.flush()
        session.refresh(row)
        said = {"role": body.role.value, "label": body.label, "expires_in_s": body.expires_in_s}
        said |= {} if body.machine is None else {"machine": body.machine}
        said |= {} if body.person is None else {"person": body.person}
        write_audit(session, caller, "key.create", key_id, tenant=body.tenant, **said)
        return NewKeyView.from_row(row, key=key)


@router.delete("/keys/{id}", status_code=204, summary="Revoke an API key", responses=refusals(404, 409))
def revoke_key(id: str, state: StateOf, caller: Operator) -> None:
    """Revokes a key immediately. The last operator's key cannot be revoked."""
    with state.transaction() as session:
        # Lock all operators' keys, so that two concurrent requests cannot revoke the last two.
        operators = session.scalars(
            select(ApiKey.id)
            .where(ApiKey.role == Role.OPERATOR.value, ApiKey.tenant.is_(None), ApiKey.is_good())
            .order_by(ApiKey.id)
            .with_for_update()
        ).all()
        row = existing(session, ApiKey, id, "API key")
        if operators == [id]:
            raise HttpProblem(
                ProblemType.CONFLICT, "this is the last operator's key; create another one before you revoke it"
            )
        if row.revoked_at is None:
            row.revoked_at = func.now()
            write_audit(session, caller, "key.revoke", id, tenant=row.tenant)


def _ensure_cluster(session: Session, machine: str) -> None:
    """Creates the machine's cluster with the capacity kind `voluntary`, if it does not exist.

    Otherwise the machine's first hello would create it with the kind `reserved`, and every workload could be placed on
    the machine.
    """
    region, cluster, _ = machine.split("/")
    if session.get(Region, region) is None:
        raise invalid("machine", f"region {region} does not exist", machine)
    new = insert(Cluster).values(region=region, name=cluster, capacity=CapacityKind.VOLUNTARY.value)
    session.execute(new.on_conflict_do_nothing())
