"""Reads what the kernel counts: bytes that an interface has sent, and whether connections wait for the link to send.

Needs no privileges. Both readers are bound to the network namespace in which they were created.
"""

import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

_STATS, _ADDRESSES, _SOCKETS, _ERROR, _DONE = 94, 22, 18, 2, 3
"""Types of netlink messages: requests for the statistics of a link, for addresses and for the TCP sockets of both
families (`TCPDIAG_GETSOCK`); error; end of a list."""
_REQUEST, _DUMP = 0x01, 0x300
_SOCK_DIAG = 4
"""The netlink protocol that lists sockets."""
_HEADER = struct.Struct("=IHHII")
_STATS_REQUEST = struct.Struct("=BxxxII")
_LINK_64 = 1
_SENT_BYTES = _STATS_REQUEST.size + 4 + 24
"""Offset of `tx_bytes` in the reply: behind the request, the header of the attribute, and three other counters."""
_ADDRESSES_REQUEST = struct.Struct("=BxxxI")
_OWN_ADDRESS = (1, 2)
"""The attributes `IFA_ADDRESS` and `IFA_LOCAL`: equal, except on links to a single peer."""
_MAPPED = b"\0" * 10 + b"\xff\xff"
"""Prefix of an IPv4 address that an IPv6 socket uses."""
_SOCKETS_REQUEST = struct.Struct("=xxxB48xIxxxx")
_ESTABLISHED = 1 << 1
_INFO = 2
"""The attribute `INET_DIAG_INFO`, whose content is `struct tcp_info`."""
_SOURCE, _TARGET, _COOKIE, _QUEUED, _ATTRIBUTES = 8, 24, 44, 60, 72
"""Offsets in `struct inet_diag_msg`: the local and the remote address, the number of the connection, the bytes in the
send queue, and the end of the structure."""
_PACING, _ACKNOWLEDGED, _NOT_SENT, _BUSY, _PEER_LIMITED = 112, 120, 144, 168, 176
"""Offsets in `struct tcp_info`: the highest rate that the process permits, the bytes that the peer has acknowledged,
the bytes that were not sent even once (32 bits), and the time in which there was something to send, of which the
peer's window left no room, in microseconds."""
_UNLIMITED = 2**64 - 1
_SOCKETS_ASKED = _SOCKETS_REQUEST.pack(1 << (_INFO - 1), _ESTABLISHED)
_PEER_SHARE = 0.1
"""If the peer's window was full for a larger share of the time, the peer limited the connection, not the link."""
_BUFFER_BYTES = 1 << 16


class InterfaceCounter:
    """Counter of the bytes that one interface has sent since its creation. The interface may be renamed."""

    def __init__(self, interface: str) -> None:
        """Finds the interface.

        Raises:
            OSError: it does not exist.
        """
        self.index = socket.if_nametoindex(interface)
        self._netlink = _Netlink(socket.NETLINK_ROUTE)

    def sent_bytes(self) -> int:
        """Returns the counter, which has 64 bits.

        Raises:
            OSError: the interface is gone.
        """
        request = _STATS_REQUEST.pack(socket.AF_UNSPEC, self.index, _LINK_64)
        [(reply, start, _)] = self._netlink.ask(_STATS, 0, request)
        (sent,) = struct.unpack_from("=Q", reply, start + _SENT_BYTES)
        return int(sent)

    def addresses(self) -> frozenset[bytes]:
        """Returns the addresses of the interface, as bytes, for `WaitingConnections.has_any`.

        Raises:
            OSError: the kernel does not answer.
        """
        found = set()
        for data, start, end in self._netlink.ask(_ADDRESSES, _DUMP, _ADDRESSES_REQUEST.pack(socket.AF_UNSPEC, 0)):
            family, index = _ADDRESSES_REQUEST.unpack_from(data, start)
            if index != self.index:
                continue
            for kind, value in _attributes(data, start + _ADDRESSES_REQUEST.size, end):
                if kind in _OWN_ADDRESS:
                    found.add(value.ljust(16, b"\0"))
                    found |= {_MAPPED + value} if family == socket.AF_INET else set()
        return frozenset(found)

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        self._netlink.close()


class WaitingConnections:
    """Detects whether TCP connections have waited for the link."""

    def __init__(self) -> None:
        self._netlink = _Netlink(_SOCK_DIAG)
        self._before: dict[bytes, _Progress] = {}

    def has_any(self, addresses: Collection[bytes]) -> bool:
        """Returns whether a connection from one of these local addresses has waited for the link since the last call.

        A connection counts if it had unsent bytes at both calls, if its peer has acknowledged bytes in between, and if
        it was not limited by the peer's receive window or by a rate that its own process has set. So a peer that has
        disappeared or that reads slowly does not make a link count as slow.

        Connections of the machine to itself do not count. The cost grows with the number of connections.

        Raises:
            OSError: the kernel does not answer.
        """
        before, self._before = self._before, {}
        for data, start, end in self._netlink.ask(_SOCKETS, _DUMP, _SOCKETS_ASKED):
            if struct.unpack_from("=I", data, start + _QUEUED)[0] == 0:
                continue
            source, target = (data[start + at : start + at + 16] for at in (_SOURCE, _TARGET))
            if source not in addresses or source == target:
                continue
            progress = _progress(data, start + _ATTRIBUTES, end)
            if progress is not None:
                self._before[data[start + _COOKIE : start + _COOKIE + 8]] = progress
        return any(connection in before and now.waited(before[connection]) for connection, now in self._before.items())

    def forget(self) -> None:
        """Resets the state, so that the next call of `has_any` counts as the first."""
        self._before.clear()

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        self._netlink.close()


class _Progress(NamedTuple):
    """The progress of a connection with unsent bytes since its start."""

    acknowledged_bytes: int
    busy_us: int
    peer_limited_us: int

    def waited(self, before: "_Progress") -> bool:
        acknowledged_bytes, busy_us, peer_limited_us = (now - then for now, then in zip(self, before, strict=True))
        return acknowledged_bytes > 0 and peer_limited_us <= _PEER_SHARE * busy_us


class _Netlink:
    """A netlink socket. It is replaced after an error, because the rest of an answer may be left in it."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._socket = self._open()

    def ask(self, kind: int, flags: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        """Yields each message of the answer: the data, and where its content begins and ends.

        Raises:
            OSError: the kernel does not answer, or refuses.
        """
        try:
            self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 0, 0) + body)
            while True:
                data, at = self._socket.recv(_BUFFER_BYTES), 0
                while at + _HEADER.size <= len(data):
                    length, kind, *_ = _HEADER.unpack_from(data, at)
                    _raise_error(data, at)
                    if kind == _DONE:
                        return
                    yield data, at + _HEADER.size, at + length
                    at += (length + 3) & ~3
                if flags != _DUMP:
                    return
        except (OSError, GeneratorExit):
            self.close()
            self._socket = self._open()
            raise

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        self._socket.close()

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, self._protocol)
        opened.settimeout(1.0)
        return opened


def _attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yields the attributes between two offsets: their kinds and values."""
    while at + 4 <= end:
        length, kind = struct.unpack_from("=HH", data, at)
        yield kind, data[at + 4 : at + length]
        at += max(4, (length + 3) & ~3)


def _progress(data: bytes, at: int, end: int) -> _Progress | None:
    """Returns the progress of a connection; None: it has no unsent bytes, or its process limits its rate."""
    info = next((value for kind, value in _attributes(data, at, end) if kind == _INFO), b"")
    if len(info) < _PEER_LIMITED + 8 or struct.unpack_from("=I", info, _NOT_SENT)[0] == 0:
        return None
    pacing, acknowledged, busy, limited = (
        struct.unpack_from("=Q", info, offset)[0] for offset in (_PACING, _ACKNOWLEDGED, _BUSY, _PEER_LIMITED)
    )
    return _Progress(acknowledged, busy, limited) if pacing == _UNLIMITED else None


def _raise_error(data: bytes, at: int) -> None:
    if _HEADER.unpack_from(data, at)[1] == _ERROR:
        (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
        raise OSError(-code, os.strerror(-code))
