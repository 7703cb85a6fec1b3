"""Probes that check whether the parts of the embedded stack work."""

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

from infra.config.services import TemporalSettings
from infra.liveness_pipe import DISPATCHER, LOOP, LivenessListener
from infra.stack.liveness import Probe
from infra.temporal_client import connect

CONNECTIONS_FULL = b"too many connections"
"""Body of the response with which the API immediately closes connections beyond its limits."""


def query(url: Callable[[], str]) -> Probe:
    """Returns a probe that checks whether Postgres accepts a new connection and runs a query."""

    async def ask() -> bool:
        async with await psycopg.AsyncConnection.connect(url(), autocommit=True) as connection:
            await connection.execute("select 1")
        return True

    return Probe("database query", ask)


class Backends:
    """Finds and kills processes of a Postgres server that are stopped by a signal.

    A stopped backend may hold locks that block all others. It is killed if it is stopped in two consecutive checks.
    Postgres then recovers by itself.
    """

    def __init__(self, postmaster: Callable[[], int | None]) -> None:
        self._postmaster = postmaster
        self._stopped: set[int] = set()

    def kill_stopped(self) -> list[int]:
        """Kills the processes that are stopped now and were stopped at the previous check. Returns their pids."""
        postmaster = self._postmaster()
        now = set() if postmaster is None else {pid for pid in _children(postmaster) if _state(pid) in ("T", "t")}
        killed = sorted(now & self._stopped)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stopped = now
        return killed


class Health:
    """Temporal's health check. Reuses one connection."""

    def __init__(self, settings: TemporalSettings) -> None:
        self._settings = settings
        self._client: Client | None = None

    async def ask(self) -> bool:
        """Whether the server reports that it is serving."""
        try:
            if self._client is None:
                self._client = await connect(self._settings)
            return await self._client.service_client.check_health()
        except RuntimeError:  # Includes RPCError.
            self._client = None
            return False

    def probe(self) -> Probe:
        """Returns the health check as a probe."""
        return Probe("health check", self.ask)


def http(url: str, answer_s: float = 60.0) -> Probe:
    """Returns a probe that checks whether a local server returns success at `url` within `answer_s`.

    The probe does not check a certificate: it sends no key, and the certificate names another host.

    A server that refuses the connection because it has too many counts as working. Otherwise a local user could have it
    killed by opening many connections.
    """
    # By default httpx loads the CA certificates, which takes 0.1 s of CPU time. `trust_env=False`, because a proxy in
    # the environment cannot reach loopback addresses.
    empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    empty.check_hostname, empty.verify_mode = False, ssl.CERT_NONE
    client = httpx.AsyncClient(timeout=answer_s, verify=empty, trust_env=False)

    async def ask() -> bool:
        try:
            answer = await client.get(url)
            return answer.is_success or answer.content == CONNECTIONS_FULL
        except httpx.HTTPError:
            return False

    return Probe("HTTP request", ask)


def liveness(listener: LivenessListener, *, dispatches: bool = False) -> list[Probe]:
    """Returns probes that check the liveness signs of a process's main loop and, with `dispatches`, its dispatcher."""

    async def loop() -> bool:
        return listener.take(LOOP)

    async def dispatcher() -> bool:
        return listener.take(DISPATCHER)

    found = [Probe("main loop", loop)]
    if dispatches:
        # No start deadline: the dispatcher starts after compilation, which may take minutes.
        needs = frozenset({"postgres", "temporal"})
        found.append(Probe("message delivery", dispatcher, needs, start_s=math.inf))
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
