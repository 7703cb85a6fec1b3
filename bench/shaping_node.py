"""A node of the suite `shaping` (`bench.network_lab`): sends and receives transfers, shaped or not."""

import socket
import threading
import time
from typing import Any

from agent.network.edge import MigrationFlow
from agent.network.machine import MachineNetwork
from agent.network.shaping import LinkShare
from bench.harness import InvalidBenchmark
from bench.pacing import PacingRun
from domain.traffic import TrafficClass

PORT, MARK = 9000, 7
_FLOW = MigrationFlow.of_mark("migration", TrafficClass.PLANNED, MARK)
_CHUNK_BYTES = 1 << 14
_machines: dict[str, MachineNetwork] = {}


def receive() -> None:
    """Receives transfers in threads; acknowledges the end of each. Starts to count bytes by class."""
    listener = socket.create_server(("", PORT), backlog=64)
    _machines["receiver"] = MachineNetwork("eth0", (), LinkShare(2, 1))

    def read(connection: socket.socket) -> None:
        with connection:
            while connection.recv(1 << 17):
                pass
            connection.sendall(b"+")

    def accept() -> None:
        while True:
            threading.Thread(target=read, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def received() -> tuple[float, int]:
    """Returns the time, and the bytes of migrations that have arrived."""
    return time.monotonic(), _machines["receiver"].received_bytes(TrafficClass.PLANNED)


def shape(link_bytes_s: float, migration_bytes_s: float, rate_bytes_s: float) -> None:
    """Gives this node's migration a rate, in bytes on the wire per second."""
    if "sender" not in _machines:
        _machines["sender"] = MachineNetwork("eth0", (), LinkShare(link_bytes_s, migration_bytes_s))
    _machines["sender"].apply({_FLOW: rate_bytes_s})
    if _machines["sender"].why_not is not None:
        raise InvalidBenchmark(str(_machines["sender"].why_not))


def unshape() -> None:
    """Removes all shaping of this node."""
    if "sender" in _machines:
        _machines.pop("sender").close()


def send(
    address: str,
    size_bytes: int | None = None,
    duration_s: float = 0.0,
    rate_bytes_s: float | None = None,
    mark: int = MARK,
) -> dict[str, Any]:
    """Sends `size_bytes`, or for `duration_s`, at most at `rate_bytes_s`; returns the times and the bytes."""
    pace = PacingRun(rate_bytes_s)
    chunk = bytes(_CHUNK_BYTES)
    with socket.socket() as transfer:
        transfer.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        transfer.connect((address, PORT))
        begin_s = time.monotonic()
        sent = 0
        while (time.monotonic() < begin_s + duration_s) if size_bytes is None else (sent < size_bytes):
            piece = chunk if size_bytes is None else chunk[: size_bytes - sent]
            pace.draw(len(piece))
            transfer.sendall(piece)
            sent += len(piece)
        transfer.shutdown(socket.SHUT_WR)
        if transfer.recv(1) != b"+":
            raise InvalidBenchmark("the receiver closed a transfer early")
        return {"begin_s": begin_s, "end_s": time.monotonic(), "bytes": sent}
