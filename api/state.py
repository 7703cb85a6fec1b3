"""State that all endpoints share: settings, database, object stores, event streams and the Temporal client."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Annotated

import httpx
from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from temporalio.client import Client

from api.auth import Logins
from api.data.archive_inspection import UploadLimits
from api.documents.document_turns import Turns
from api.fleet.recent_costs import RecentCosts
from api.metrics import Metrics
from api.oidc import Tokens
from api.refusals import Recorder
from api.sessions.relays import Relays
from api.streams.hub import Hub
from api.streams.store_reads import StoreReads
from api.threads import Threads
from api.workloads.queue_limit import QueueLimit
from infra.config.settings import Settings
from infra.db import published_queue
from infra.db.session import close_engine, open_engine, transaction
from infra.errors import ConfigurationError
from infra.temporal_client import connect, payload_codec
from mizzen.objects import ObjectStore, open_store

_POOL = 25
"""Number of connections that are kept open. Up to twice as many can be opened, one per thread (`api.threads`)."""
_AUTHENTICATION_POOL = 4
_UI_ANSWERS_S = 120.0


class ApiState:
    """The shared state of one API process."""

    def __init__(self, settings: Settings) -> None:
        if settings.database is None:
            raise ConfigurationError("database: not set; the API needs the URL of a migrated Postgres")
        self.settings = settings
        self.engine: Engine = open_engine(settings.database, pool_size=_POOL, application="mizzen-api")
        self.authentication_engine: Engine = open_engine(
            settings.database, pool_size=_AUTHENTICATION_POOL, application="mizzen-api-keys"
        )
        """Separate connections for key lookups, because requests may use all connections of `engine`."""
        self.threads = Threads()
        self.tokens = None if settings.api.oidc is None else Tokens(settings.api.oidc)
        self.logins = Logins(self.authentication_engine, self.threads, settings.limits, self.tokens)
        self.refusals = Recorder(self.authentication_engine, self.threads.authentication, settings.api.audited_refusals)
        self.uploads = UploadLimits(settings)
        self.documents = Turns()
        self.queue_limit = QueueLimit(settings.limits.queued_per_tenant, settings.limits.full_queue_retry_s)
        self.hub = Hub(self.engine, settings.limits)
        self.relays = Relays(self.engine, settings)
        self.store_reads = StoreReads(self.threads.stores)
        self.metrics = Metrics(self.engine, self.hub)
        self.recent_costs = RecentCosts(self.engine)
        self.store: Callable[[str], ObjectStore] = lru_cache(maxsize=256)(open_store)
        """Returns the object store for the URL of a bucket; results are cached."""
        self.queue = published_queue.Newest()
        """The queue that the last scan published."""
        ui = settings.temporal.ui_socket
        self.temporal_ui = (
            None
            if ui is None
            else httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(ui)),
                timeout=_UI_ANSWERS_S,
                headers={"accept-encoding": "identity"},
            )
        )
        """A client of the embedded Temporal's UI; None: there is none."""
        self.payload_codec = payload_codec(settings.temporal)
        """Codec that decrypts payloads in Temporal; None: payloads are not encrypted."""
        self._temporal: Client | None = None
        self._temporal_lock = asyncio.Lock()

    def transaction(self) -> AbstractContextManager[Session]:
        """Returns a session in one transaction (`infra.db.session.transaction`)."""
        return transaction(self.engine)

    async def temporal(self) -> Client:
        """Returns the Temporal client, which is connected at its first use.

        Raises:
            ConfigurationError: no address is configured.
            RuntimeError: the service cannot be reached.
        """
        async with self._temporal_lock:
            if self._temporal is None:
                self._temporal = await connect(self.settings.temporal)
            return self._temporal

    async def aclose(self) -> None:
        """Ends all streams and closes the connections to Postgres."""
        await self.hub.aclose()
        await self.relays.end_all()
        if self.temporal_ui is not None:
            await self.temporal_ui.aclose()
        await self.refusals.aclose()
        self.threads.close()
        self.dispose()

    def dispose(self) -> None:
        """Closes the idle connections to Postgres now, and each of the others when its thread returns it."""
        close_engine(self.engine)
        close_engine(self.authentication_engine)


async def _state(request: Request) -> ApiState:
    state = request.app.state.mizzen
    assert isinstance(state, ApiState)
    return state


StateOf = Annotated[ApiState, Depends(_state)]
