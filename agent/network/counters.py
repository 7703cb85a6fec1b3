"""Reads what the kernel counts: bytes that an interface has sent, and whether connections still have bytes to send.

Needs no privileges. Both readers are bound to the network namespace in which they were created.
"""

import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator

_STATS, _ADDRESSES, _SOCKETS, _ERROR, _DONE = 94, 22, 18, 2, 3
"""Types of netlink messages: requests for the statistics of a link, for addresses and for the TCP sockets of both
families (`TCPDIAG_GETSOCK`); error; end of a list."""
_REQUEST, _DUMP = 0x01, 0x300
_SOCK_DIAG = 4
"""The netlink protocol that lists sockets."""
_HEADER = struct.Struct("=IHHII")
_STATS_REQUEST = struct.Struct("=BxxxII")
_LINK_64 = 1
_SENT_BYTES = _HEADER.size + _STATS_REQUEST.size + 4 + 24
"""Offset of `tx_bytes` in the reply: behind the headers, the header of the attribute, and three other counters."""
_ADDRESSES_REQUEST = struct.Struct("=BxxxI")
_OWN_ADDRESS = (1, 2)
"""The attributes `IFA_ADDRESS` and `IFA_LOCAL`: equal, except on links to a single peer."""
_MAPPED = b"\0" * 10 + b"\xff\xff"
"""What precedes an IPv4 address that a socket of IPv6 uses."""
_SOCKETS_REQUEST = struct.Struct("=xxxB48xIxxxx")
_ESTABLISHED = 1 << 1
_INFO = 2
"""The attribute `INET_DIAG_INFO`, whose content is `struct tcp_info`."""
_SOURCE, _TARGET, _QUEUED, _ATTRIBUTES = 8, 24, 60, 72
"""Offsets in `struct inet_diag_msg`: the local and the remote address, the bytes in the send queue, and its end."""
_NOT_SENT = 144
"""Offset of `tcpi_notsent_bytes`: bytes that the connection has not sent even once."""
_BUFFER_BYTES = 1 << 16


class InterfaceCounter:
    """The bytes that one interface has sent since it exists. It follows the interface when it is renamed."""

    def __init__(self, interface: str) -> None:
        """Finds the interface.

        Raises:
            OSError: it does not exist.
        """
        self.index = socket.if_nametoindex(interface)
        self._netlink = _netlink(socket.NETLINK_ROUTE)

    def sent_bytes(self) -> int:
        """Returns the counter, which has 64 bits.

        Raises:
            OSError: the interface is gone.
        """
        self._netlink.send(_message(_STATS, 0, _STATS_REQUEST.pack(socket.AF_UNSPEC, self.index, _LINK_64)))
        reply = self._netlink.recv(_BUFFER_BYTES)
        _raise_error(reply, 0)
        (sent,) = struct.unpack_from("=Q", reply, _SENT_BYTES)
        return int(sent)

    def addresses(self) -> frozenset[bytes]:
        """Returns the addresses of the interface as `UnsentBytes` compares them.

        Raises:
            OSError: the kernel does not answer.
        """
        found = set()
        self._netlink.send(_message(_ADDRESSES, _DUMP, _ADDRESSES_REQUEST.pack(socket.AF_UNSPEC, 0)))
        for data, start, end in _replies(self._netlink):
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


class UnsentBytes:
    """Tells whether TCP connections have bytes to send that they have not sent yet."""

    def __init__(self) -> None:
        self._netlink = _netlink(_SOCK_DIAG)

    def has_any(self, addresses: Collection[bytes]) -> bool:
        """Returns whether an established connection from one of these local addresses has unsent bytes.

        Connections of the machine to itself do not count. The cost grows with the number of connections.

        Raises:
            OSError: the kernel does not answer.
        """
        found = False
        self._netlink.send(_message(_SOCKETS, _DUMP, _SOCKETS_REQUEST.pack(1 << (_INFO - 1), _ESTABLISHED)))
        for data, start, end in _replies(self._netlink):
            if found or struct.unpack_from("=I", data, start + _QUEUED)[0] == 0:
                continue
            source, target = (data[start + at : start + at + 16] for at in (_SOURCE, _TARGET))
            found = source in addresses and source != target and _not_sent(data, start + _ATTRIBUTES, end) > 0
        return found

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        self._netlink.close()


def _replies(netlink: socket.socket) -> Iterator[tuple[bytes, int, int]]:
    """Yields each message of a list: the data, and where its content begins and ends. Reads the list to its end."""
    while True:
        data, at = netlink.recv(_BUFFER_BYTES), 0
        while at + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, at)
            _raise_error(data, at)
            if kind == _DONE:
                return
            yield data, at + _HEADER.size, at + length
            at += (length + 3) & ~3


def _attributes(data: bytes, at: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yields the attributes between two offsets: their kinds and values."""
    while at + 4 <= end:
        length, kind = struct.unpack_from("=HH", data, at)
        yield kind, data[at + 4 : at + length]
        at += max(4, (length + 3) & ~3)


def _not_sent(data: bytes, at: int, end: int) -> int:
    info = next((value for kind, value in _attributes(data, at, end) if kind == _INFO), b"")
    return int.from_bytes(info[_NOT_SENT : _NOT_SENT + 4], sys.byteorder)


def _netlink(protocol: int) -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    opened.settimeout(1.0)
    return opened


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 0, 0) + body


def _raise_error(data: bytes, at: int) -> None:
    if _HEADER.unpack_from(data, at)[1] == _ERROR:
        (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
        raise OSError(-code, os.strerror(-code))
