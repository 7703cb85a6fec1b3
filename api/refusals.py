"""Records refused requests and failed logins in the audit log, with a limit so that an attacker cannot flood it.

Equal refusals within an hour share one entry with a count. Each process writes at most `audited_refusals` entries per
hour and counts all further refusals in one additional entry. The entries are deleted like all other audit entries.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import Engine, update
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import caller_of, login_failure_of
from api.problems import is_refusal
from api.threads import ThreadPool
from infra.db.logs import Audit
from infra.db.session import transaction

WINDOW_S = 3600.0
_FLUSH_S = 2.0
_UNKNOWN = "unknown"
_STATUSES = (401, 403, 429)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditedRefusal:
    """The fields by which refusals are grouped into one audit entry."""

    action: str
    actor: str
    tenant: str | None
    target: str
    detail: tuple[tuple[str, Any], ...]


@dataclass
class _Entry:
    """The audit entry of a group of equal refusals."""

    first_at: datetime
    last_at: datetime
    count: int = 0
    written: int = 0
    """The count that is stored in the database."""
    id: int | None = None

    def detail(self) -> dict[str, Any]:
        """Returns the count and the times of the first and last refusal, for the entry's detail."""
        return {"first_at": self.first_at.isoformat(), "last_at": self.last_at.isoformat(), "count": self.count}


class Recorder:
    """Writes refusals to the audit log shortly after they happen. Must be used from one event loop only.

    `threads` and `engine` are shared with key lookups. At most `most` entries are created per hour.
    """

    def __init__(self, engine: Engine, threads: ThreadPool, most: int) -> None:
        self._engine = engine
        self._threads = threads
        self._most = most
        self._entries: dict[AuditedRefusal, _Entry] = {}
        self._window_s = time.monotonic()
        self._writing: asyncio.Task[None] | None = None

    def note(self, refusal: AuditedRefusal) -> None:
        """Counts a refusal. It appears in the audit log within seconds."""
        now = datetime.now(UTC)
        if time.monotonic() - self._window_s >= WINDOW_S:
            self._entries = {r: entry for r, entry in self._entries.items() if entry.count > entry.written}
            self._window_s = time.monotonic()
        if refusal not in self._entries and len(self._entries) >= self._most:
            refusal = AuditedRefusal("request.refused", _UNKNOWN, None, "others", ())
        entry = self._entries.setdefault(refusal, _Entry(now, now))
        entry.last_at = now
        entry.count += 1
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._keep_writing(), name="audit of refusals")

    async def aclose(self) -> None:
        """Writes all pending counts."""
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write_due()

    async def _keep_writing(self) -> None:
        while await self._write_due():
            await asyncio.sleep(_FLUSH_S)

    async def _write_due(self) -> bool:
        """Writes pending counts. Returns whether there were any, also if writing failed."""
        due = {refusal: replace(entry) for refusal, entry in self._entries.items() if entry.count > entry.written}
        if not due:
            return False
        try:
            ids = await self._threads.run(partial(self._write, due))
        except SQLAlchemyError as error:
            _log.warning("audit of refusals: %s", str(error).splitlines()[0])
            return True
        for refusal, id_ in ids.items():
            entry = self._entries[refusal]
            entry.id, entry.written = id_, due[refusal].count
        return True

    def _write(self, due: Mapping[AuditedRefusal, _Entry]) -> dict[AuditedRefusal, int]:
        ids = {}
        with transaction(self._engine) as session:
            for refusal, entry in due.items():
                detail = {**dict(refusal.detail), **entry.detail()}
                if entry.id is not None:
                    session.execute(update(Audit).where(Audit.id == entry.id).values(detail=detail))
                    ids[refusal] = entry.id
                else:
                    row = Audit(
                        actor=refusal.actor, tenant=refusal.tenant, action=refusal.action, target=refusal.target,
                        detail=detail,
                    )  # fmt: skip
                    session.add(row)
                    session.flush()
                    ids[refusal] = row.id
        return ids


class Noting:
    """ASGI middleware around authentication: records refused requests and their callers."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and (message["status"] in _STATUSES or is_refusal(scope)):
                self._recorder.note(_refusal(scope, message["status"]))
            await send(message)

        await self._app(scope, receive, noted)


def _refusal(scope: Scope, status: int) -> AuditedRefusal:
    client = scope.get("client")
    address = ("address", str(client[0]) if client else _UNKNOWN)
    failure = login_failure_of(scope)
    if failure is not None:
        return AuditedRefusal(
            "login.failed", failure.actor or _UNKNOWN, failure.tenant, "/v1", (address, ("why", failure.why))
        )
    caller = caller_of(scope)
    route = str(getattr(scope.get("route"), "path", "/v1"))  # The template: ids in paths create no new entries.
    actor, tenant = (caller.id, caller.tenant) if caller else (_UNKNOWN, None)
    method = scope["method"] if len(scope["method"]) <= 10 else "other"
    if is_refusal(scope):
        tenant = None  # A tenant's audit log must not reveal that objects of other tenants exist.
    return AuditedRefusal("request.refused", actor, tenant, f"{method} {route}", (address, ("status", status)))
