"""Authentication by API key or token of an issuer, and authorisation by role and tenant.

The key of a request under `/v1` or `/temporal` is looked up by its hash before the rest of the request is read; a token
is checked by `api.oidc`.
Endpoints then require a role with `Balancer`, `Viewer`, `Submitter` or `Operator`. An endpoint that requires no role
still needs a valid key.
"""

import base64
import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from sqlalchemy import Engine, Row, bindparam, func, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.logins import FailedLogins, address_of
from api.problems import HttpProblem, ProblemType, not_found, of_database, over_limit
from api.threads import Threads
from infra.config.services import LimitSettings
from infra.db.console_sessions import find_session
from infra.db.session import transaction
from infra.db.tenants import ApiKey
from infra.keys import KEY_PREFIX, hash_api_key
from infra.temporal_client import UI_PATH

if TYPE_CHECKING:
    from api.oidc import Tokens

_CALLER = "mizzen.caller"
_FAILURE = "mizzen.login-failure"
_KEY = select(
    ApiKey.id, ApiKey.role, ApiKey.tenant, ApiKey.machine, ApiKey.label, ApiKey.revoked_at, ApiKey.expires_at,
    ApiKey.person, func.clock_timestamp().label("now"),
).where(ApiKey.sha256 == bindparam("sha256"))  # fmt: skip
_NO_KEY = "send an API key: Authorization: Bearer mzn_..."
EXPIRY_HEADER = "mizzen-key-expires"
"""Response header with the expiry time of the key; it is sent only if the key expires soon."""
_CHALLENGE = 'Bearer realm="mizzen"'
_BROWSER_CHALLENGE = 'Basic realm="mizzen: the password is an operator key"'


class Role(StrEnum):
    """Role of a key. A viewer can read, a submitter can also change its tenant's workloads, an operator can do all.

    A machine can read only its own page. Its agent connects to the gateway with this key. A balancer can read the
    endpoints of services, their changes and their certificates with the keys, and report counts of requests.
    """

    MACHINE = "machine"
    BALANCER = "balancer"
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"


_ORDER = {role: number for number, role in enumerate(Role)}


@dataclass(frozen=True)
class Caller:
    """The API key or token that authenticated a request."""

    id: str
    """Id of the key, or `oidc:` and the token's subject; it is the actor in the audit log."""
    role: Role
    tenant: str | None
    """The key can read and change only objects of this tenant; None: of all tenants."""
    label: str
    expires_at: datetime | None = None
    machine: str | None = None
    """The key can read only this machine's page; None: the key does not belong to a machine."""
    is_token: bool = False
    """Whether an issuer's token, and not an API key, authenticated the request."""
    person: str | None = None
    """Who uses the key, if an operator has said so."""

    @property
    def submitter(self) -> str:
        """The person whose use of the fleet a submission counts towards: that of the key, otherwise the id."""
        return self.person or self.id

    def may(self, role: Role) -> bool:
        """Returns whether the key has at least `role`.

        A key with a tenant never has the role of an operator, because operators act on all tenants.
        """
        if role is Role.OPERATOR and self.tenant is not None:
            return False
        return _ORDER[self.role] >= _ORDER[role]

    def sees(self, tenant: str | None) -> bool:
        """Returns whether the key may see objects of `tenant`; None: objects that belong to no tenant."""
        return self.machine is None and (self.tenant is None or self.tenant == tenant)

    def require_machine(self, machine: str) -> None:
        """Raises 403 if the key belongs to another machine or to a balancer."""
        if self.role is Role.BALANCER:
            raise HttpProblem(
                ProblemType.FORBIDDEN, f"machine {machine}: a balancer's key can read only endpoints of services"
            )
        if self.machine not in (None, machine):
            raise HttpProblem(ProblemType.FORBIDDEN, f"machine {machine}: the key can read only machine {self.machine}")

    def require_counter(self) -> None:
        """Raises 403 if the key may not report counts of requests: a viewer's key changes nothing."""
        if self.role is Role.VIEWER:
            raise HttpProblem(
                ProblemType.FORBIDDEN,
                "the operation requires the role balancer or submitter; the key has the role viewer",
            )

    def require_balancer(self) -> None:
        """Raises 403 unless the key has the role balancer or operator: no other key may read secrets."""
        if self.role is not Role.BALANCER and not self.may(Role.OPERATOR):
            raise HttpProblem(
                ProblemType.FORBIDDEN,
                f"the operation requires the role balancer or operator; the key has the role {self.role}",
            )

    def require_tenant(self, tenant: str) -> None:
        """Raises 404 for an object of another tenant, as if it did not exist."""
        if not self.sees(tenant):
            raise not_found("tenant", tenant, is_hidden=True)


def caller_of(scope: Scope) -> Caller | None:
    """Returns the caller of the request; None before authentication, and on paths that need no key."""
    caller = scope.get(_CALLER)
    return caller if isinstance(caller, Caller) else None


def enter(scope: Scope, caller: Caller) -> None:
    """Stores `caller` as the caller of the request."""
    scope[_CALLER] = caller


def authenticate(engine: Engine, authorization: str | None, tokens: "Tokens | None" = None) -> Caller:
    """Returns the caller for an `Authorization` header. `tokens` checks tokens of an issuer; None: only keys are valid.

    Unknown and revoked keys get the same response. A key is looked up by its hash, so the time of the lookup reveals
    nothing about existing keys.

    Raises:
        LoginFailed: 401, there is no valid key.
        HttpProblem: 503, the token cannot be checked now.
    """
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    if not authorization:
        raise LoginFailed("no key", _NO_KEY)
    if scheme.lower() != "bearer" or not key:
        raise LoginFailed("no bearer token", "the Authorization header must have the form: Bearer mzn_...")
    if tokens is not None and not key.startswith(KEY_PREFIX):
        return tokens.caller(key)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        row = connection.execute(_KEY, {"sha256": hash_api_key(key)}).first()
    if row is None or row.revoked_at is not None:
        why = "unknown key" if row is None else "revoked key"
        raise LoginFailed(why, "the API key is unknown or was revoked", row, is_token=True)
    if row.expires_at is not None and row.expires_at <= row.now:
        detail = f"the API key expired at {row.expires_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC; request a new one"
        raise LoginFailed("expired key", detail, row, is_token=True)
    return Caller(row.id, Role(row.role), row.tenant, row.label, row.expires_at, row.machine, person=row.person)


def is_below(path: str, *tops: str) -> bool:
    """Returns whether a path equals one of `tops`, or lies below one of them."""
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def _of_browser(authorization: str | None) -> str | None:
    """Converts a browser's Basic header, whose password is the key, to a Bearer header; other headers are unchanged."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    with contextlib.suppress(ValueError):
        return f"Bearer {base64.b64decode(encoded, validate=True).decode().partition(':')[2]}"
    return authorization


def _of_session(engine: Engine, sha256: str) -> Caller | None:
    with transaction(engine) as session:
        row = find_session(session, sha256)
    if row is None:
        return None
    if row.token is not None:
        return Caller(**{**row.token, "role": Role(row.token["role"])}, expires_at=row.expires_at, is_token=True)
    return Caller(row.id, Role(row.role), row.tenant, row.label, row.expires_at, row.machine, person=row.person)


class LoginFailed(HttpProblem):
    """Status 401, with the details for the audit log, which never contain the given key."""

    def __init__(self, why: str, detail: str, row: Row[Any] | None = None, *, is_token: bool = False) -> None:
        challenge = f'{_CHALLENGE}, error="invalid_token"' if is_token else _CHALLENGE
        super().__init__(ProblemType.UNAUTHENTICATED, detail, headers={"WWW-Authenticate": challenge})
        self.why = why
        self.actor = row.id if row is not None else None
        self.tenant = row.tenant if row is not None else None


def login_failure_of(scope: Scope) -> LoginFailed | None:
    """Returns the reason why the request had no valid key; None: it had one."""
    failure = scope.get(_FAILURE)
    return failure if isinstance(failure, LoginFailed) else None


class Logins:
    """Authenticates requests, and limits failed logins by address.

    Keys are looked up in the threads of `threads.authentication` and with `engine`, which have no other use, so that
    slow requests do not block logins. An address with too many failed logins gets 429 for each further failure.
    Valid keys from that address still work, because clients can share an address. They are looked up in
    `threads.suspects`, so that the address cannot occupy the threads for other logins.
    """

    def __init__(self, engine: Engine, threads: Threads, limits: LimitSettings, tokens: "Tokens | None") -> None:
        self._engine = engine
        self._threads = threads
        self._limits = limits
        self._tokens = tokens
        self._failed = FailedLogins(limits.failed_logins_per_address, limits.failed_logins_burst)

    async def caller(self, scope: Scope, authorization: str | None) -> Caller:
        """Returns the caller for the `Authorization` header of the request of `scope`.

        Raises:
            LoginFailed: 401, there is no valid key; the audit log gets the failure.
            HttpProblem: 429, the address has sent too many of them; 503, the key cannot be checked now.
        """
        address = address_of(scope)
        pool = self._threads.suspects if self._failed.is_over(address) else self._threads.authentication
        try:
            return await pool.run(partial(authenticate, self._engine, authorization, self._tokens))
        except LoginFailed as problem:
            scope[_FAILURE] = problem
            if (wait_s := self._failed.count(address)) > 0:
                raise self._too_many(address, problem, wait_s) from None
            raise
        except SQLAlchemyError as error:
            raise of_database(error) from None

    async def of_browser(self, sha256: str) -> Caller | None:
        """Returns the caller who has logged in at the console; None: the login has ended, or its key is not valid.

        `sha256`: hash of the secret in the browser's cookie.

        Raises:
            HttpProblem: 503, the database does not answer.
        """
        try:
            return await self._threads.authentication.run(partial(_of_session, self._engine, sha256))
        except SQLAlchemyError as error:
            raise of_database(error) from None

    def _too_many(self, address: str, problem: LoginFailed, wait_s: float) -> HttpProblem:
        most = self._limits.failed_logins_per_address
        return over_limit(
            "failed_logins_per_address", most,
            f"{problem.detail}; {address} has sent too many requests without a valid key; send at most {most:g} per"
            " second",
            wait_s,
        )  # fmt: skip


class Authentication:
    """ASGI middleware: a request under `/v1` or `/temporal` needs a valid key before an endpoint is called or a body is
    read.
    """

    def __init__(self, app: ASGIApp, logins: Logins, warning_s: float) -> None:
        self._app = app
        self._logins = logins
        self._warning_s = warning_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or not is_below(scope["path"], "/v1", UI_PATH):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization")
        of_browser = is_below(scope["path"], UI_PATH)
        try:
            caller = await self._logins.caller(scope, _of_browser(given) if of_browser else given)
        except HttpProblem as problem:
            if isinstance(problem, LoginFailed) and of_browser:
                problem.headers = {"WWW-Authenticate": _BROWSER_CHALLENGE}
            await problem.response()(scope, receive, send)
        else:
            enter(scope, caller)
            await self._app(scope, receive, self._warning(caller, send))

    def _warning(self, caller: Caller, send: Send) -> Send:
        """Returns a `send` that adds the expiry header if the key expires soon."""
        expires_at = caller.expires_at
        # A token lives for minutes, and its holder gets a new one without an operator.
        if caller.is_token or expires_at is None or expires_at - datetime.now(UTC) > timedelta(seconds=self._warning_s):
            return send
        header = (EXPIRY_HEADER.encode(), expires_at.astimezone(UTC).isoformat(timespec="seconds").encode())

        async def warned(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        return warned


_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    bearerFormat="mzn_...",
    description="An API key. Each operation names the lowest role that it requires: machine, balancer, viewer,"
    " submitter or operator. With a machine's key, only the machine itself can be read.",
)


async def _caller(
    scopes: SecurityScopes,
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    caller = caller_of(request.scope)
    if caller is None:
        raise LoginFailed("no key", _NO_KEY)
    for scope in scopes.scopes:
        role = Role(scope)
        if not caller.may(role):
            own = f"the key has the role {caller.role.value}" + (f" in tenant {caller.tenant}" if caller.tenant else "")
            own += f" of {caller.machine}" if caller.machine else ""
            raise HttpProblem(ProblemType.FORBIDDEN, f"the operation requires the role {role.value}; {own}")
    return caller


AnyKey = Annotated[Caller, Security(_caller, scopes=[Role.MACHINE.value])]
"""Also accepts keys of machines and balancers: the endpoint must check which machine the key belongs to."""
Balancer = Annotated[Caller, Security(_caller, scopes=[Role.BALANCER.value])]
"""Also accepts keys of balancers: the endpoint must return only data that balancers need."""
Viewer = Annotated[Caller, Security(_caller, scopes=[Role.VIEWER.value])]
Submitter = Annotated[Caller, Security(_caller, scopes=[Role.SUBMITTER.value])]
Operator = Annotated[Caller, Security(_caller, scopes=[Role.OPERATOR.value])]
