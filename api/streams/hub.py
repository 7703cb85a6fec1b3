"""One LISTEN connection per process that wakes the streams for which a new event is relevant.

Each stream reads the event log from its own cursor, so a lost notification delays events but never loses one.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import psycopg
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError

from api.auth import Caller
from api.problems import HttpProblem, ProblemType, over_limit
from infra.config.services import LimitSettings
from infra.db import events, notifications
from infra.db.events import Cursor
from infra.db.notifications import notified
from infra.db.session import in_db
from infra.db.tenants import ApiKey

KEYS_S = 10.0
"""Interval at which the keys of open streams are checked for revocation and expiry."""
_POLL_S = 1.0
"""Poll interval for events that were not readable yet when their notification arrived."""
_COALESCE_S = 0.05
_RETRY_S = 1.0
_RETRY_AFTER_S = 5
_PAGE = 500
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Follower:
    """A stream that waits for events of one workload, of one tenant, or, if both are None, for all events."""

    workload: str | None
    tenant: str | None
    caller: Caller
    """Who has opened it."""
    closing: asyncio.Event
    due: asyncio.Event = field(default_factory=asyncio.Event)
    is_revoked: bool = False
    was_told: bool = False
    """Whether the last wait ended with a notification."""

    def concerned(self, workload: str | None, tenant: str | None) -> bool:
        """Returns whether the stream includes an event of this workload and tenant."""
        return self.workload in (None, workload) and self.tenant in (None, tenant)

    async def wait(self, timeout_s: float) -> bool:
        """Waits for a notification, at most `timeout_s`.

        Returns False if the stream has to end, because of a shutdown or because its key was revoked.
        """
        if not self.closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.due.wait()
        self.was_told = self.due.is_set()
        self.due.clear()
        return not (self.closing.is_set() or self.is_revoked)

    async def pause(self, time_s: float) -> None:
        """Waits without regard to notifications; a shutdown ends it. The next `wait` reports what came meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time_s):
                await self.closing.wait()


class Hub:
    """The open streams of one process. Must be used from one event loop only."""

    def __init__(self, engine: Engine, limits: LimitSettings) -> None:
        self._engine = engine
        self._limits = limits
        self._streams: Counter[tuple[str, ...]] = Counter()
        """Number of open streams by key, by tenant, and by person and tenant of browsers, whether they wait for new
        events or not."""
        self._open = 0
        self._followers: set[Follower] = set()
        self._closing = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def followers(self) -> int:
        """Number of open streams that wait for new events."""
        return len(self._followers)

    def admit(self, caller: Caller, *, waits: bool, is_browser: bool = False) -> Callable[[], None]:
        """Counts a new stream of `caller`. Returns a function that must be called when the stream ends.

        A stream that `waits` for new events can stay open for days; it also counts towards the limit of the process.
        The streams of a person's browsers (`is_browser`) count as one of the tenant, and have the limit of a key for
        themselves: programs with the same key do not keep the pages from opening. A key that names no person is one.

        Raises:
            Problem: 429 if the key or tenant has reached its limit of streams, 503 if the process has.
        """
        own: tuple[str, ...] = ("key", caller.id)
        if is_browser:
            own = ("browser", caller.submitter, caller.tenant or "")
        owners = [(own, self._limits.streams_per_key)]
        if caller.tenant is not None and not (is_browser and self._streams[own]):
            owners.append((("tenant", caller.tenant), self._limits.streams_per_tenant))
        for owner, most in owners:
            if self._streams[owner] >= most:
                kind = "tenant" if owner[0] == "tenant" else "key"
                raise over_limit(
                    f"streams_per_{kind}", most,
                    f"{kind} {owner[1]} has {self._streams[owner]} streams of events and logs open; close one first",
                    _RETRY_AFTER_S,
                )  # fmt: skip
        if waits and self._open >= self._limits.streams:
            raise HttpProblem(
                ProblemType.TOO_MANY_FOLLOWERS,
                f"{self._open} streams are open, the maximum of one process; retry later",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        self._open += waits
        self._streams.update(owner for owner, _ in owners)
        return partial(self._leave, own, caller.tenant, waits)

    def _leave(self, own: tuple[str, ...], tenant: str | None, waits: bool) -> None:
        self._open -= waits
        self._release(own)
        if tenant is not None and not (own[0] == "browser" and self._streams[own]):
            self._release(("tenant", tenant))

    def _release(self, owner: tuple[str, ...]) -> None:
        self._streams[owner] -= 1
        if not self._streams[owner]:
            del self._streams[owner]

    @contextmanager
    def register(
        self, caller: Caller, workload: str | None, tenant: str | None = None, *, waits: bool
    ) -> Iterator[Follower]:
        """Context manager that registers a stream. The first that `waits` starts the listener, the last stops it."""
        follower = Follower(workload, tenant, caller, self._closing)
        if not waits:
            yield follower
            return
        self._followers.add(follower)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(self._listen(), name="event listener")
        try:
            yield follower
        finally:
            self._followers.discard(follower)
            if not self._followers:
                self._stop_listening()

    def close(self) -> None:
        """Ends all open streams, and all that are opened later."""
        self._closing.set()
        self._wake_all()

    async def aclose(self) -> None:
        """Like `close`, but also waits until the listener has returned its connections."""
        self.close()
        self._stop_listening()
        if self._ending:
            await asyncio.wait(self._ending)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            self._ending.add(self._listener)
            self._listener.add_done_callback(self._ending.discard)
            self._listener = None

    def _wake_all(self) -> None:
        for follower in self._followers:
            follower.due.set()

    async def _listen(self) -> None:
        url = self._engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        while True:
            try:
                connection = await notifications.connect(url, connect_timeout=5, application_name="mizzen-api-listener")
                async with connection:
                    await connection.execute(f"listen {events.CHANNEL}")
                    cursor = await in_db(self._engine, events.position)
                    self._wake_all()  # Events may have been written while no connection was listening.
                    checked_s = time.monotonic()
                    while True:
                        await notified(connection, _POLL_S)
                        # One that is due has not yet looked at the log, and will see all that was written until then.
                        if not all(follower.due.is_set() for follower in self._followers):
                            cursor = await self._wake_concerned(cursor)
                        if time.monotonic() - checked_s >= KEYS_S:
                            await self._end_revoked()
                            checked_s = time.monotonic()
                        await asyncio.sleep(_COALESCE_S)
            except (psycopg.Error, SQLAlchemyError) as error:
                _log.warning("event listener: %s", str(error).splitlines()[0] if str(error) else repr(error))
                await asyncio.sleep(_RETRY_S)

    async def _wake_concerned(self, cursor: Cursor) -> Cursor:
        while True:
            found = await in_db(self._engine, events.concerned_after, cursor, limit=_PAGE)
            for _, workload, tenant in found:
                for follower in self._followers:
                    if follower.concerned(workload, tenant):
                        follower.due.set()
            cursor = found[-1][0] if found else cursor
            if len(found) < _PAGE:
                return cursor

    async def _end_revoked(self) -> None:
        keys = {follower.caller.id for follower in self._followers if not follower.caller.is_token}
        valid = select(ApiKey.id).where(ApiKey.id.in_(keys), ApiKey.is_good())
        good = await in_db(self._engine, lambda session: set(session.scalars(valid)))
        now = datetime.now(UTC)
        for follower in self._followers:
            caller = follower.caller
            has_expired = caller.is_token and caller.expires_at is not None and caller.expires_at <= now
            if has_expired or caller.id in keys - good:
                follower.is_revoked = True
                follower.due.set()
