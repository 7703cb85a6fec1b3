"""What each part of the embedded stack is asked to find out whether it works."""

import contextlib
import math
import os
import signal
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
from temporalio.client import Client

from infra.config import TemporalSettings
from infra.liveness_pipe import DISPATCHER, LOOP, LivenessListener
from infra.stack.liveness import Probe
from infra.temporal_client import connect


def query(url: Callable[[], str]) -> Probe:
    """Postgres takes a new connection and answers."""

    async def ask() -> bool:
        async with await psycopg.AsyncConnection.connect(url(), autocommit=True) as connection:
            await connection.execute("select 1")
        return True

    return Probe("answers a query", ask)


class Backends:
    """None of a server's processes is stopped: a backend may hold locks for which all others wait.

    One that was stopped at two questions in a row is killed: Postgres then recovers by itself.
    """

    def __init__(self, postmaster: Callable[[], int | None]) -> None:
        self._postmaster = postmaster
        self._stopped: set[int] = set()

    def look(self) -> list[int]:
        """Kills those that were stopped before and still are; their process ids."""
        postmaster = self._postmaster()
        now = set() if postmaster is None else {pid for pid in _children(postmaster) if _state(pid) in ("T", "t")}
        killed = sorted(now & self._stopped)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stopped = now
        return killed


class Health:
    """Temporal's health check, over one connection."""

    def __init__(self, settings: TemporalSettings) -> None:
        self._settings = settings
        self._client: Client | None = None

    async def ask(self) -> bool:
        """Whether the server says that it serves."""
        try:
            if self._client is None:
                self._client = await connect(self._settings)
            return await self._client.service_client.check_health()
        except RuntimeError:  # RPCError is one.
            self._client = None
            return False

    def probe(self) -> Probe:
        """As a probe."""
        return Probe("answers a health check", self.ask)


def http(url: str, answer_s: float = 60.0) -> Probe:
    """A server of this machine answers at `url`, which is plain HTTP; `answer_s` is a limit beside the prober's."""
    # By default httpx loads the CA certificates, a tenth of a second of CPU, also for plain HTTP: an empty TLS context
    # avoids it. `trust_env=False`: a proxy named in the environment cannot reach this machine's loopback addresses.
    empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = httpx.AsyncClient(timeout=answer_s, verify=empty, trust_env=False)

    async def ask() -> bool:
        try:
            return (await client.get(url)).is_success
        except httpx.HTTPError:
            return False

    return Probe("answers a request", ask)


def liveness(listener: LivenessListener, *, dispatches: bool = False) -> list[Probe]:
    """A process's own loops turn."""

    async def loop() -> bool:
        return listener.take(LOOP)

    async def dispatcher() -> bool:
        return listener.take(DISPATCHER)

    found = [Probe("its main loop turns", loop)]
    if dispatches:
        # It begins when everything is compiled, which may take minutes.
        needs = frozenset({"postgres", "temporal"})
        found.append(Probe("delivers mail", dispatcher, needs, start_s=math.inf))
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
