"""Limits the connections of each address, and counts them.

gRPC has no hook for a new connection. So the process looks at its own sockets every second, and ends the newest
connections of an address that has too many: gRPC then sees their end, as if the client had closed them. A connection
counts from the moment it is accepted, before TLS and before any key.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from domain.addresses import network_of
from proxies.gateway.limits import Buckets

_LOOK_S = 1.0
_REST = 10
"""The pause after a check, as a multiple of its duration, which is 30 microseconds for each connection."""
_RESERVE = 4
"""Number of descriptors that a check needs."""
_LOGGED_PER_S, _LOGGED_BURST = 0.1, 1.0
_Peer = tuple[str, int]
_log = logging.getLogger(__name__)


class Connections:
    """The connections of agents to this process."""

    def __init__(self, port: int, most: int) -> None:
        """`port` is where the process listens; `most` is the number of connections that one address may have."""
        self._port, self._most = port, most
        self._seen_s: dict[_Peer, float] = {}
        self._logged = Buckets(_LOGGED_PER_S, _LOGGED_BURST)
        self._reserve: list[int] = []
        self._fill_reserve()
        self.open = 0
        """Number of connections that the last check found."""
        self.addresses = 0
        """Number of addresses with connections."""
        self.ended = 0
        """Number of connections that were closed because their address had too many."""

    async def run(self) -> None:
        """Checks the connections until cancelled: every second, or less often if there are very many."""
        try:
            while True:
                began_s = time.monotonic()
                try:
                    await asyncio.to_thread(self.end_excess)
                except OSError as error:
                    _log.warning("the connections cannot be counted, retrying: %s", error)
                await asyncio.sleep(max(_LOOK_S, _REST * (time.monotonic() - began_s)))
        finally:
            self._empty_reserve()

    def end_excess(self) -> None:
        """Counts the connections, and ends the newest ones of each address that has too many. Blocks for a moment.

        Raises:
            OSError: the process has too many open files, even without the reserve.
        """
        self._empty_reserve()
        try:
            self._end_excess()
        finally:
            self._fill_reserve()

    def _end_excess(self) -> None:
        now_s = time.monotonic()
        peers = [peer for peer, _ in self._sockets()]
        self._seen_s = {peer: self._seen_s.get(peer, now_s) for peer in peers}
        by_address: dict[str, list[_Peer]] = defaultdict(list)
        for peer in peers:
            by_address[network_of(ipaddress.ip_address(peer[0].partition("%")[0]))].append(peer)
        self.open, self.addresses = len(peers), len(by_address)
        excess: set[_Peer] = set()
        for address, its in by_address.items():
            if len(its) > self._most:
                its.sort(key=lambda peer: (self._seen_s[peer], peer))
                excess.update(its[self._most :])
                if self._logged.take(address):
                    _log.warning("address %s: %d connections; the newest beyond %d end", address, len(its), self._most)
        if excess:
            self._end(excess)

    def _fill_reserve(self) -> None:
        """Reserves descriptors for the next check, because connections may use up all others."""
        with contextlib.suppress(OSError):
            while len(self._reserve) < _RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY))

    def _empty_reserve(self) -> None:
        while self._reserve:
            os.close(self._reserve.pop())

    def _end(self, peers: set[_Peer]) -> None:
        for peer, one in self._sockets():
            if peer in peers:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:  # The client has closed it meanwhile.
                    continue
                self.ended += 1

    def _sockets(self) -> Iterator[tuple[_Peer, socket.socket]]:
        """Yields each connection's peer and a duplicate of its socket, which is closed afterwards."""
        for entry in Path("/proc/self/fd").iterdir():
            try:
                if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                    continue
                # A duplicate: gRPC may close the descriptor at any time, and another file may then get its number.
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != self._port:
                        continue
                    yield one.getpeername()[:2], one
            except OSError:  # It was closed, or it listens.
                continue
