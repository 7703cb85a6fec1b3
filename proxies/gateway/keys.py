"""Authentication of agents by API keys of the role `machine`, and the end of their calls when a key is revoked.

Valid keys are kept in memory and are all checked again every two seconds with one query. If Postgres cannot be read,
they stay valid for some minutes, so that an outage of Postgres does not disconnect the machines: while their tasks run,
agents need only Temporal.

Lookups of unknown keys are limited for each address. So that the many machines behind one address can connect at the
same time, also while one of them sends wrong keys, the hashes of all valid keys of machines are read every 30 seconds:
their lookups are not limited.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import grpc
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError

from infra.db.tenants import ApiKey
from infra.keys import KEY_PREFIX, hash_api_key
from proxies.gateway.limits import Buckets, lookups
from proxies.gateway.refusals import Refused, unauthenticated

_CHECK_S = 2.0
_TRUSTED_S = 600.0
"""How long a key stays valid after its last successful check while Postgres cannot be read."""
_FORGOTTEN_S = 60.0
"""A key without calls is forgotten after this time."""
_QUERY_S = 5.0
_LISTED_S = 30.0
"""How often the hashes of all valid keys are read."""
_KEY_LENGTH = 200
_NO_KEY = "send the API key of a machine: --temporal-api-key mzn_... (metadata authorization: Bearer mzn_...)"
_BAD_KEY = "the API key is unknown, expired or revoked"
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class MachineSession:
    """A valid key of a machine, and its calls in progress."""

    sha256: str
    key_id: str
    machine: str
    checked_s: float
    used_s: float
    calls: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the key is no longer valid."""


class Sessions:
    """The valid keys that agents use. Must be used from one event loop."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        # The checks have their own thread, so that lookups of many new keys do not delay a revocation.
        self._checking = ThreadPoolExecutor(1, thread_name_prefix="check")
        self._looking = ThreadPoolExecutor(2, thread_name_prefix="lookup")
        self._known: dict[str, MachineSession] = {}
        self._lookups: Buckets = lookups(clock)
        self._listed: set[str] = set()
        self._listed_at_s = -math.inf
        self._checked_at_s = clock()

    @property
    def in_use(self) -> int:
        """Number of valid keys that were used recently."""
        return len(self._known)

    @property
    def check_age_s(self) -> float:
        """Seconds since all keys in use were valid, according to Postgres."""
        return self._clock() - self._checked_at_s

    async def of_call(self, authorization: str | None, address: str) -> MachineSession:
        """Returns the session for the `authorization` metadata of a call from `address`.

        Raises:
            Refused: there is no valid key of a machine, or it cannot be looked up now.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key.startswith(KEY_PREFIX) or len(key) > _KEY_LENGTH:
            raise unauthenticated(_NO_KEY)
        sha256 = hash_api_key(key)
        now_s = self._clock()
        session = self._known.get(sha256)
        if session is not None and now_s - session.checked_s < _TRUSTED_S:
            session.used_s = now_s
            return session
        if sha256 in self._listed:
            return await self._look_up(sha256)
        # The token is taken before the lookup, which also limits the lookups of an address that are in progress.
        if not self._lookups.take(address):
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"address {address}: too many unknown keys; retry later")
        session = await self._look_up(sha256)
        self._lookups.give_back(address)
        return session

    async def list_keys(self) -> None:
        """Reads the hashes of all valid keys of machines, unless they were read recently or Postgres is unavailable."""
        now_s = self._clock()
        if now_s - self._listed_at_s < _LISTED_S:
            return
        try:
            async with asyncio.timeout(_QUERY_S):
                self._listed = await self._run(self._looking, _all_valid)
        except (SQLAlchemyError, TimeoutError) as error:
            _log.warning("keys cannot be listed, lookups are limited for each address: %s", error)
        else:
            self._listed_at_s = now_s

    async def check(self) -> None:
        """Checks all keys in use until cancelled. Calls of keys that are no longer valid end."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._check_once()
            except (SQLAlchemyError, TimeoutError) as error:
                _log.warning("keys cannot be checked, revocations are delayed: %s", error)
            await self.list_keys()

    async def _check_once(self) -> None:
        now_s = self._clock()
        for sha256, session in list(self._known.items()):
            if not session.calls and now_s - session.used_s > _FORGOTTEN_S:
                del self._known[sha256]
        asked = list(self._known.values())
        if not asked:
            self._checked_at_s = now_s
            return
        async with asyncio.timeout(_QUERY_S):
            valid = await self._run(self._checking, partial(_valid, hashes=[session.sha256 for session in asked]))
        self._checked_at_s = now_s
        for session in asked:
            if valid.get(session.sha256, ("", "", None))[:2] == (session.key_id, session.machine):
                session.checked_s = now_s
            else:
                self._known.pop(session.sha256, None)
                session.ended.set()
                _log.warning("machine %s: key %s is no longer valid", session.machine, session.key_id)

    async def _look_up(self, sha256: str) -> MachineSession:
        now_s = self._clock()
        try:
            async with asyncio.timeout(_QUERY_S):
                found = (await self._run(self._looking, partial(_valid, hashes=[sha256]))).get(sha256)
        except (SQLAlchemyError, TimeoutError) as error:
            _log.warning("a key cannot be looked up: %s", error)
            raise Refused(grpc.StatusCode.UNAVAILABLE, "keys cannot be looked up now; retry later") from None
        if found is None:
            self._listed.discard(sha256)
            raise unauthenticated(_BAD_KEY)
        key_id, machine, role = found
        if machine is None:
            message = f"key {key_id} has the role {role}; an agent needs a key of its machine: mizzen keys create"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"{message} --role machine --machine ID")
        # Two lookups of a key can overlap; their calls must share one session.
        session = self._known.setdefault(sha256, MachineSession(sha256, key_id, machine, now_s, now_s))
        session.checked_s = session.used_s = now_s
        return session

    async def _run(self, executor: ThreadPoolExecutor, query: Callable[[Engine], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, query, self._engine)

    def close(self) -> None:
        """Stops the threads, and waits until their queries have ended. Blocks."""
        for executor in (self._checking, self._looking):
            executor.shutdown(cancel_futures=True)


def _valid(engine: Engine, hashes: Sequence[str]) -> dict[str, tuple[str, str | None, str]]:
    """Maps those hashes (SHA-256) whose key is neither revoked nor expired to the key's id, machine and role."""
    wanted = select(ApiKey.sha256, ApiKey.id, ApiKey.machine, ApiKey.role).where(
        ApiKey.sha256.in_(hashes), ApiKey.is_good()
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return {sha256: (id_, machine, role) for sha256, id_, machine, role in connection.execute(wanted)}


def _all_valid(engine: Engine) -> set[str]:
    """Returns the SHA-256 of all keys of machines that are neither revoked nor expired."""
    wanted = select(ApiKey.sha256).where(ApiKey.machine.is_not(None), ApiKey.is_good())
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return set(connection.scalars(wanted))
