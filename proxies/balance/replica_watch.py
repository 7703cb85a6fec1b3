"""Watches the replicas of one service, and ejects those that fail or hang (`proxies.balance.outliers`)."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxies.balance.counts import STATISTICS, Rows, held_requests, read_rows, server_counts
from proxies.balance.first_bytes import SESSIONS, FirstByteWaits
from proxies.balance.outliers import Ejection, OutlierChange, Outliers, ServerCounts
from proxies.balance.runtime import Members, RuntimeSocket
from proxies.balance.speeds import Speeds
from proxies.balance.values import Service

_SHORTEST_S, _LONGEST_S = 0.005, 0.5
"""The limits of the pause between two checks after failures. The pause doubles with each check, so that a service whose
requests often fail does not cost much, and is short again after a second without failures."""
_CHUNK_BYTES = 1 << 16
_TRIAL_PERCENT = 5
_FEW = 200
"""Number of requests in progress up to which a thorough check is cheap."""
_log = logging.getLogger(__name__)


class ReplicaWatch:
    """The ejections of one service's replicas, which outlive its HAProxy processes."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._reading, self.errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """`errors` is the descriptor to which HAProxy writes a line for each failed or repeated request."""
        self._pause_s = _SHORTEST_S
        self._outliers = Outliers()
        self._waits = FirstByteWaits()
        self._speeds = Speeds()
        self._servers: dict[str, ServerCounts] = {}
        self._listed: set[str] = set()
        """The servers that may get requests."""
        self.waiting = 0
        """The number of requests that waited for a first replica at the last check."""

    @property
    def ejections(self) -> dict[str, Ejection]:
        """The replicas that are ejected or tried, by the name of their servers; times are monotonic."""
        return self._outliers.ejections

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or are in progress, or replicas are drained, so that each second is reported."""
        return self.waiting > 0 or any(one.active or name not in self._listed for name, one in self._servers.items())

    @property
    def is_followed(self) -> bool:
        """Whether requests are in progress, but so few that thorough checks several times a second are cheap."""
        return 0 < sum(one.active for one in self._servers.values()) <= _FEW

    def to_json(self) -> dict[str, Any]:
        """Returns the object `now` of a report to the API."""
        now_s, ejections = time.monotonic(), self.ejections
        found: dict[int, dict[str, Any]] = {}
        for server, counts in self._servers.items():
            replica = int(server.partition("-")[0])
            one = ejections.get(server)
            before = found.get(replica, {"ongoing": 0, "drained": True, "ejected_s": None, "why": None})
            found[replica] = {
                "replica": replica,
                "ongoing": before["ongoing"] + counts.active,
                "drained": before["drained"] and server not in self._listed,
                "ejected_s": before["ejected_s"] if one is None else now_s - one.since_s,
                "why": before["why"] if one is None else one.why,
            }
        return {"waiting": self.waiting, "replicas": list(found.values())}

    async def started(self, members: Members) -> None:
        """Ejects the replicas again after HAProxy was restarted.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer.
        """
        self._outliers.restarted()
        self._speeds.restarted()
        self._waits.clear()
        for name, one in self.ejections.items():
            await members.limit(name, _TRIAL_PERCENT if one.is_trial else 0)

    async def failures(self) -> None:
        """Waits until requests have failed, at least for a pause since the last call."""
        await asyncio.sleep(self._pause_s)
        began_s = time.monotonic()
        loop, failed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._reading, failed.set)
        try:
            await failed.wait()
        finally:
            loop.remove_reader(self._reading)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, _CHUNK_BYTES):
                pass
        is_quiet = time.monotonic() - began_s >= 1
        self._pause_s = _SHORTEST_S if is_quiet else min(_LONGEST_S, 2 * self._pause_s)

    async def look(
        self,
        runtime: RuntimeSocket,
        members: Members,
        service: Service,
        first_bytes_s: Mapping[str, Sequence[float]] | None,
    ) -> Rows:
        """Ejects and admits replicas by their counts, and returns HAProxy's counters.

        A look is thorough if the times to the first byte of the answers since the last thorough look are given. Then it
        also reads how long each request has waited. That takes about 10 µs for each request.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer.
        """
        rows = read_rows(await runtime.ask(STATISTICS))
        self._servers, self.waiting = server_counts(rows), held_requests(rows)
        now_s = time.monotonic()
        limit_s = service.first_byte_s
        if first_bytes_s is not None:
            is_idle = not any(one.active for one in self._servers.values())
            self._waits.update("" if is_idle else await runtime.ask(SESSIONS), now_s)
            if limit_s is not None:
                await self._end_overdue(runtime, limit_s, now_s)
        self._listed = members.names
        counts = {name: one for name, one in self._servers.items() if name in self._listed}
        verdicts = self._outliers.observe(counts, self._waits.longest_s(now_s), limit_s, now_s, first_bytes_s)
        for name, verdict in verdicts.items():
            await self._carry_out(members, name, verdict)
        if first_bytes_s is not None:
            kinds = _kinds(service, counts)
            for name, percent in self._speeds.observe(kinds, counts, now_s).items():
                await members.share(name, percent)
        return rows

    async def _end_overdue(self, runtime: RuntimeSocket, limit_s: float, now_s: float) -> None:
        """Ends the connections of requests that have waited too long for the first byte, as if their replica had died.

        So they are repeated on another replica if that is allowed.
        """
        for id_ in self._waits.overdue(limit_s, now_s):
            await runtime.ask(f"shutdown session {id_}")

    async def _carry_out(self, members: Members, name: str, verdict: OutlierChange) -> None:
        replica, ejection = name.partition("-")[0], self.ejections.get(name)
        if verdict is OutlierChange.ADMITTED:
            _log.info("%s: replica %s is admitted again", self._service, replica)
            await members.limit(name, 100)
        elif verdict is OutlierChange.TRIED:
            await members.limit(name, _TRIAL_PERCENT)
        elif ejection is not None:
            pause_s = ejection.pause_s
            _log.warning("%s: replica %s is ejected for %g s: %s", self._service, replica, pause_s, ejection.why)
            await members.limit(name, 0)


def _kinds(service: Service, names: Iterable[str]) -> dict[str, str]:
    """Returns the kind of each server, which determines its share with its speed; `round_robin` has one kind only."""
    by_replica = {one.replica: f"{one.gpu_type} in {one.zone.region}" for one in service.endpoints}
    if service.policy == "round_robin":
        by_replica = {}
    return {name: by_replica.get(int(name.partition("-")[0]), "") for name in names}
