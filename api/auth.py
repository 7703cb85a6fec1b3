"""Who calls: API keys, found by their hash, with a role and a tenant.

The key is looked up before anything else of a request under `/v1` is read. Endpoints then ask for a role with
`Viewer`, `Submitter` or `Operator`; one that forgot to would still be closed to strangers.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import Kind, Problem, not_found, of_database
from api.threads import Pool
from infra.db.models import ApiKey
from infra.db.session import transaction
from infra.keys import hash_api_key

_CALLER = "mizzen.caller"
_CHALLENGE = 'Bearer realm="mizzen"'


class Role(StrEnum):
    """What a key may do: a viewer reads, a submitter also changes its tenant's workloads, an operator everything."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"


_ORDER = {Role.VIEWER: 0, Role.SUBMITTER: 1, Role.OPERATOR: 2}


@dataclass(frozen=True)
class Caller:
    """The key of a request."""

    id: str
    """The actor in the audit list."""
    role: Role
    tenant: str | None
    """Sees and touches only this tenant's things; None: all."""
    label: str

    def may(self, role: Role) -> bool:
        """Whether it has at least `role`. Operators act on everyone's things, so a key with a tenant is never one."""
        if role is Role.OPERATOR and self.tenant is not None:
            return False
        return _ORDER[self.role] >= _ORDER[role]

    def sees(self, tenant: str | None) -> bool:
        """Whether it may see things of `tenant` (None: nobody's)."""
        return self.tenant is None or self.tenant == tenant

    def require_tenant(self, tenant: str) -> None:
        """Refuses what belongs to another tenant, as if it were not there."""
        if not self.sees(tenant):
            raise not_found("tenant", tenant)


def caller_of(scope: Scope) -> Caller | None:
    """Who sent the request of `scope`; None before authentication, and where none is needed."""
    caller = scope.get(_CALLER)
    return caller if isinstance(caller, Caller) else None


def authenticate(engine: Engine, authorization: str | None) -> Caller:
    """The caller with this `Authorization` header.

    Unknown, malformed and revoked keys get the same answer. The key is looked up by its hash, so the time that it
    takes tells nothing about the keys there are.

    Raises:
        Problem: 401.
    """
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    if not authorization:
        raise _refusal("send an API key: Authorization: Bearer mzn_...", _CHALLENGE)
    if scheme.lower() != "bearer" or not key:
        raise _refusal("the Authorization header must have the form: Bearer mzn_...", _CHALLENGE)
    with transaction(engine) as session:
        row = session.scalar(select(ApiKey).where(ApiKey.sha256 == hash_api_key(key), ApiKey.revoked_at.is_(None)))
    if row is None:
        raise _refusal("the API key is not known, or was revoked", f'{_CHALLENGE}, error="invalid_token"')
    return Caller(row.id, Role(row.role), row.tenant, row.label)


def _refusal(detail: str, challenge: str) -> Problem:
    return Problem(Kind.UNAUTHENTICATED, detail, headers={"WWW-Authenticate": challenge})


class Authentication:
    """ASGI middleware: nothing below `/v1` is reached, and no body read, without a valid key.

    Keys are looked up in `threads` and over `engine`, which nothing else uses, so requests that hang keep nobody from
    logging in.
    """

    def __init__(self, app: ASGIApp, engine: Engine, threads: Pool) -> None:
        self._app = app
        self._engine = engine
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or not (scope["path"] == "/v1" or scope["path"].startswith("/v1/")):
            await self._app(scope, receive, send)
            return
        try:
            given = Headers(scope=scope).get("authorization")
            scope[_CALLER] = await self._threads.run(partial(authenticate, self._engine, given))
        except Problem as problem:
            await problem.response()(scope, receive, send)
        except SQLAlchemyError as error:
            await of_database(error).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    bearerFormat="mzn_...",
    description="An API key. Each operation names the least role that it needs: viewer, submitter or operator.",
)


async def _caller(
    scopes: SecurityScopes,
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    caller = caller_of(request.scope)
    if caller is None:
        raise _refusal("send an API key: Authorization: Bearer mzn_...", _CHALLENGE)
    for scope in scopes.scopes:
        role = Role(scope)
        if not caller.may(role):
            own = f"this key is a {caller.role.value}'s" + (f" of tenant {caller.tenant}" if caller.tenant else "")
            raise Problem(Kind.FORBIDDEN, f"this needs the role {role.value}; {own}")
    return caller


Viewer = Annotated[Caller, Security(_caller, scopes=[Role.VIEWER.value])]
Submitter = Annotated[Caller, Security(_caller, scopes=[Role.SUBMITTER.value])]
Operator = Annotated[Caller, Security(_caller, scopes=[Role.OPERATOR.value])]
