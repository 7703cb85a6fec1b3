"""The sessions whose clients are connected to this process: limits their number, renews them and ends revoked ones."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from functools import partial

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from api.problems import busy
from api.sessions import session_rows as records
from api.sessions.relay import Relay
from infra.config.settings import Settings
from infra.db.session import in_db
from infra.db.task_sessions import RENEW_S

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0


class Relays:
    """The sessions of one process. Must be used from one event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._most = settings.limits.sessions
        self._open: dict[str, Relay] = {}
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the periodic renewal of the sessions' rows."""
        self._renewing = asyncio.create_task(self._renew(), name="sessions")

    def require_room(self) -> None:
        """Raises 503 if the process has the maximum number of sessions."""
        if len(self._open) >= self._most:
            raise busy(f"{self._most} sessions are open in this process, the maximum (limits.sessions)")

    def get(self, id_: str) -> Relay | None:
        """Returns a session of this process."""
        return self._open.get(id_)

    @contextlib.contextmanager
    def registered(self, relay: Relay) -> Iterator[None]:
        """Context manager in whose block agents can join the session."""
        self._open[relay.opened.id] = relay
        try:
            yield
        finally:
            del self._open[relay.opened.id]

    async def end_all(self) -> None:
        """Ends all sessions, because the process ends, and waits until their rows are deleted."""
        if self._renewing is not None:
            self._renewing.cancel()
        for relay in self._open.values():
            relay.stop("the API process is being stopped; start the command again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._open:
                    await asyncio.sleep(0.01)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            ids = list(self._open)
            try:
                good = await in_db(self._engine, partial(records.renew, ids=ids))
            except SQLAlchemyError as error:
                _log.warning("sessions cannot be renewed: %s", str(error).splitlines()[0])
                continue
            for id_ in set(ids) - good:
                if (relay := self._open.get(id_)) is not None:
                    relay.stop("the API key was revoked or has expired, or the workload was deleted")
