"""Sums vectors over the processes of a gang, through rank 0, over TCP.

Rank 0 adds the vectors in the order of the ranks, so the result does not depend on the order of arrival. If a peer dies
or sends nothing for too long, every rank raises `GangError`, because the sum needs the vectors of all ranks.
"""

import errno
import hashlib
import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_HELLO = struct.Struct("<8s16sII")
_MAGIC = b"digits/1"
_LENGTH = struct.Struct("<Q")
_COMPLETE = b"\x01"
_POLL_S = 0.05
_HELLO_TIMEOUT_S = 2.0


class GangError(Exception):
    """The gang did not become complete, or it lost a rank."""


class Gang:
    """The connected processes of a gang. All ranks must make the same calls in the same order."""

    def __init__(self, rank: int, peers: list[socket.socket]) -> None:
        """Use `join` instead. `peers`: on rank 0 the connections to all other ranks, in order; else to rank 0."""
        self.rank = rank
        self._peers = peers

    def sum(self, vector: Vector) -> Vector:
        """Returns the sum of the vectors of all ranks, which must have equal lengths. It is bit-identical on all ranks.

        Raises:
            GangError: a peer is gone, sent nothing for too long, or sent a vector of another length.
        """
        if self.rank > 0:
            _send(self._peers[0], vector)
            return _receive(self._peers[0], vector.size, "rank 0")
        total = vector.copy()
        for rank, peer in enumerate(self._peers, start=1):
            total += _receive(peer, vector.size, f"rank {rank}")
        for peer in self._peers:
            _send(peer, total)
        return total

    def barrier(self) -> None:
        """Returns when every rank has called this method."""
        self.sum(np.zeros(1))

    def __enter__(self) -> "Gang":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers:
            peer.close()


def join(
    rank: int,
    world_size: int,
    address: tuple[str, int],
    token: str,
    *,
    deadline_s: float,
    silence_s: float,
    stop: Callable[[], bool],
) -> Gang:
    """Connects all ranks. Returns when all of them are connected.

    Args:
        rank: the rank of this process, 0 to `world_size` - 1.
        world_size: number of processes.
        address: host and port of the rendezvous, where rank 0 listens.
        token: identifies the gang and its attempt. A process with another token is rejected.
        deadline_s: how long to wait for the other ranks.
        silence_s: a connected peer that sends nothing for this time counts as dead.
        stop: called while waiting; if it returns True, the wait ends with an error.

    Raises:
        GangError: not all ranks connected in time, or `stop` returned True.
    """
    end_s = time.monotonic() + deadline_s
    hello = _HELLO.pack(_MAGIC, hashlib.sha256(token.encode()).digest()[:16], rank, world_size)

    def wait(for_what: str) -> None:
        if stop():
            raise GangError(f"stopped while waiting for {for_what}")
        if time.monotonic() > end_s:
            raise GangError(f"waited {deadline_s:.0f} s for {for_what}")

    peers = _gather(world_size, address, hello, wait) if rank == 0 else [_dial(address, hello, wait)]
    for peer in peers:
        peer.settimeout(silence_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Gang(rank, peers)


def _gather(
    world_size: int, address: tuple[str, int], hello: bytes, wait: Callable[[str], None]
) -> list[socket.socket]:
    """Rank 0: accepts connections until every other rank has sent its hello, then confirms to all of them."""
    if world_size == 1:
        return []
    joined: dict[int, socket.socket] = {}
    with _listen(address, wait) as listener:
        while len(joined) < world_size - 1:
            missing = [rank for rank in range(1, world_size) if rank not in joined]
            wait(f"ranks {missing} at {address[0]}:{address[1]}")
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            rank = _greet(peer, hello)
            if rank is None or not 0 < rank < world_size:
                peer.close()
                continue
            # A rank that lost its connection connects again: its last connection counts.
            if rank in joined:
                joined[rank].close()
            joined[rank] = peer
    peers = [joined[rank] for rank in range(1, world_size)]
    for rank, peer in enumerate(peers, start=1):
        try:
            peer.sendall(_COMPLETE)
        except OSError as error:
            raise GangError(f"rank {rank} is gone: {error}") from error
    return peers


def _listen(address: tuple[str, int], wait: Callable[[str], None]) -> socket.socket:
    host = address[0]
    while True:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, address[1]))
            listener.listen()
            listener.settimeout(_POLL_S)
            return listener
        except OSError as error:
            listener.close()
            # `address` is the one that peers use. Behind NAT, no interface of this machine has it: listen on all.
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                host = ""
            wait(f"the port {address[1]} to be free")
            time.sleep(_POLL_S)


def _greet(peer: socket.socket, hello: bytes) -> int | None:
    """Returns the rank of a peer of this gang, or None for any other connection."""
    peer.settimeout(_HELLO_TIMEOUT_S)
    try:
        magic, token, rank, world_size = _HELLO.unpack(_exactly(peer, _HELLO.size))
    except (OSError, EOFError):
        return None
    mine = _HELLO.unpack(hello)
    return int(rank) if (magic, token, world_size) == (mine[0], mine[1], mine[3]) else None


def _dial(address: tuple[str, int], hello: bytes, wait: Callable[[str], None]) -> socket.socket:
    """Other ranks: connects to rank 0, repeatedly, until rank 0 confirms that the gang is complete."""
    while True:
        wait(f"rank 0 at {address[0]}:{address[1]}")
        try:
            peer = socket.create_connection(address, timeout=_HELLO_TIMEOUT_S)
        except OSError:
            time.sleep(_POLL_S)
            continue
        if _admitted(peer, hello, wait):
            return peer
        peer.close()
        time.sleep(_POLL_S)


def _admitted(peer: socket.socket, hello: bytes, wait: Callable[[str], None]) -> bool:
    try:
        peer.sendall(hello)
        peer.settimeout(_POLL_S)
        while True:
            wait("the other ranks")
            try:
                return peer.recv(1) == _COMPLETE
            except TimeoutError:
                continue
    except OSError:
        return False


def _send(peer: socket.socket, vector: Vector) -> None:
    try:
        peer.sendall(_LENGTH.pack(vector.nbytes) + vector.tobytes())
    except OSError as error:
        raise GangError(f"a peer is gone: {error}") from error


def _receive(peer: socket.socket, size: int, who: str) -> Vector:
    try:
        (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
        if length != size * 8:
            raise GangError(f"{who} sent {length} bytes instead of {size * 8}")
        return np.frombuffer(_exactly(peer, length), np.float64)
    except EOFError:
        raise GangError(f"{who} is gone") from None
    except TimeoutError:
        raise GangError(f"{who} sent nothing for {peer.gettimeout():.0f} s") from None
    except OSError as error:
        raise GangError(f"{who} is gone: {error}") from error


def _exactly(peer: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = peer.recv_into(view)
        if got == 0:
            raise EOFError
        view = view[got:]
    return data
