"""Endpoints for a tenant's secrets. Values can be written but not read back."""

from datetime import datetime

from pydantic import Field
from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Caller, Submitter, Viewer
from api.bodies import Body, JsonOnly, Name
from api.openapi import refusals
from api.paging import MAX_ITEMS, Cursor, Limit, Page, page
from api.problems import HttpProblem, ProblemType, existing, not_found, over_limit
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import View, write_audit
from infra.db.tenants import Secret, Tenant
from infra.errors import ConfigurationError
from infra.keys import encrypt_secret, load_master_key
from infra.master_key import opens

MAX_SECRET = 32 << 10
_FULL_RETRY_S = 60
router = Router(prefix="/v1/tenants/{name}/secrets", tags=["tenants"], dependencies=[JsonOnly])


class SecretBody(Body):
    """The value of a secret. Only tasks that name the secret receive it."""

    value: str = Field(min_length=1, max_length=MAX_SECRET, json_schema_extra={"writeOnly": True})


class SecretView(View):
    """A secret without its value."""

    name: str
    updated_at: datetime


class SecretList(Page[SecretView]):
    """A page of secrets, sorted by name."""


@router.get("", summary="List a tenant's secrets", responses=refusals(404))
def list_secrets(
    name: str, state: StateOf, caller: Viewer, limit: Limit = MAX_ITEMS, cursor: Cursor = None
) -> SecretList:
    """Lists the names of a tenant's secrets. Values are never returned."""
    caller.require_tenant(name)
    wanted = select(Secret.name, Secret.updated_at).where(Secret.tenant == name).order_by(Secret.name).limit(limit + 1)
    if cursor is not None:
        wanted = wanted.where(Secret.name > cursor)
    with state.transaction() as session:
        existing(session, Tenant, name, "tenant")
        rows, following = page(session.execute(wanted).all(), limit, lambda row: str(row.name))
        items = [SecretView(name=secret, updated_at=updated_at) for secret, updated_at in rows]
        return SecretList(items=items, next_cursor=following)


@router.put("/{secret}", summary="Create or replace a secret", responses=refusals(404))
def put_secret(name: str, secret: Name, body: SecretBody, state: StateOf, caller: Submitter) -> SecretView:
    """Stores a value, encrypted with the installation's master key. Later attempts get the new value."""
    caller.require_tenant(name)
    with state.transaction() as session:
        existing(session, Tenant, name, "tenant")
        updated_at = store_secret(session, state, caller, (name, secret), body.value)
        return SecretView(name=secret, updated_at=updated_at)


def store_secret(
    session: Session, state: ApiState, caller: Caller, key: tuple[str, str], value: str, service: str | None = None
) -> datetime:
    """Stores the value of a tenant's secret; returns the time. `service`: id of the service that owns the secret.

    Raises:
        HttpProblem: the tenant has too many secrets, or this process cannot encrypt.
    """
    tenant, name = key
    if session.get(Secret, key) is None:
        _require_room(session, tenant, state.settings.limits.secrets_per_tenant)
    box = encrypt_secret(secrets_key(session, state), value)
    row = insert(Secret).values(tenant=tenant, name=name, box=box, service=service)
    changed = {"box": row.excluded.box, "service": row.excluded.service, "updated_at": func.now()}
    stored = row.on_conflict_do_update(index_elements=["tenant", "name"], set_=changed).returning(Secret.updated_at)
    updated_at = session.execute(stored).scalar_one()
    write_audit(session, caller, "secret.set", f"{tenant}/{name}", tenant=tenant)
    return updated_at


@router.delete("/{secret}", status_code=204, summary="Delete a secret", responses=refusals(404))
def delete_secret(name: str, secret: str, state: StateOf, caller: Submitter) -> None:
    """Deletes a secret. Later attempts of workloads that name it cannot start until it exists again."""
    caller.require_tenant(name)
    with state.transaction() as session:
        gone = delete(Secret).where(Secret.tenant == name, Secret.name == secret).returning(Secret.name)
        if session.execute(gone).first() is None:
            raise not_found(f"secret of tenant {name}", secret)
        write_audit(session, caller, "secret.delete", f"{name}/{secret}", tenant=name)


def _require_room(session: Session, tenant: str, most: int) -> None:
    lock = text("select pg_advisory_xact_lock(hashtext('secret'), hashtext(:tenant))")
    session.execute(lock, {"tenant": tenant})
    kept = session.scalar(select(func.count()).where(Secret.tenant == tenant)) or 0
    if kept >= most:
        detail = f"tenant {tenant} has {kept} secrets; delete unused ones"
        raise over_limit("secrets_per_tenant", most, detail, _FULL_RETRY_S)


def secrets_key(session: Session, state: ApiState) -> bytes:
    """Returns the master key, which encrypts secrets.

    Raises:
        HttpProblem: this process has no master key, or its master key does not decrypt the stored secrets.
    """
    try:
        key = load_master_key(state.settings.master_key_path)
    except ConfigurationError:
        raise HttpProblem(
            ProblemType.NOT_READY, "the API process has no master key, so it cannot store secrets; set master_key"
        ) from None
    known = session.scalars(select(Secret.box).order_by(Secret.updated_at.desc()).limit(1)).first()
    if known is not None and not opens(key, known):
        raise HttpProblem(
            ProblemType.NOT_READY,
            "the API process's master key cannot decrypt the stored secrets; set master_key correctly",
        )
    return key
