"""Reserves ports for the rendezvous of jobs whose task 0 runs on this machine, and for a task that serves requests."""

import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterable

from agent.state import AttemptFolder, StateFolder

SERVING = "serving port"
"""Holder of the port on which a task serves requests. No job can have this name."""


class NoFreePort(Exception):
    """Every port in the machine's range is reserved or in use."""


class TooManyPorts(Exception):
    """An attempt needs more ports on this machine than the machine's range has."""


class PortTaken(Exception):
    """The fixed port of a task is in use on this machine."""


def bindable(port: int) -> bool:
    """Whether the port can be bound on all addresses now. It cannot while old connections are in TIME_WAIT."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class Ports:
    """The reservations of ports on this machine: of all attempts here that are not over (`StateFolder.is_over`).

    They are stored in the folders of the attempts. Machines that share an address need disjoint ranges, because an
    agent sees only its own reservations. The methods block, and threads may call them concurrently.
    """

    def __init__(self, state: StateFolder, first: int, last: int, free: Callable[[int], bool] = bindable) -> None:
        """`first` and `last` are the range, inclusive."""
        self._state = state
        self._first, self._size = first, last - first + 1
        self._free = free
        self._lock = threading.Lock()
        self._holders: dict[int, AttemptFolder] | None = None
        """The attempt that last reserved each port. None: the folders have not been read yet."""

    def reserve(self, attempt: AttemptFolder, jobs: Iterable[str]) -> dict[str, int]:
        """Reserves one port in the range for each of `jobs`, and returns the ports by job.

        Idempotent: the same attempt and job get the same port again. `SERVING` can take the place of a job. The search
        starts at a hash of attempt and job, so a leftover task of an earlier attempt rarely connects to this one.

        Raises:
            NoFreePort: no port in the range is free.
            TooManyPorts: there are more jobs than ports in the range.
        """
        jobs, last = set(jobs), self._first + self._size - 1
        if len(jobs) > self._size:
            raise TooManyPorts(
                f"{attempt.key} needs {len(jobs)} ports on this machine; its range is {self._first} to {last}"
            )
        with self._lock:
            held = attempt.ports()
            for job in sorted(jobs - held.keys()):
                start = zlib.crc32(f"{attempt.key}.{job}".encode())
                candidates = (self._first + (start + step) % self._size for step in range(self._size))
                unheld = (p for p in candidates if p not in held.values() and self._holder(p) is None)
                port = next((p for p in unheld if self._free(p)), None)
                if port is None:
                    holder = job if job == SERVING else f"job {job}"
                    raise NoFreePort(f"{holder} of {attempt.key}: none of the ports {self._first} to {last} is free")
                held[job] = port
            attempt.save_ports(held)
            self._known().update(dict.fromkeys(held.values(), attempt))
            return {job: held[job] for job in jobs}

    def reserve_fixed(self, attempt: AttemptFolder, port: int) -> None:
        """Reserves exactly `port` for the attempt's task that serves. Idempotent.

        Raises:
            PortTaken: another attempt has reserved the port, or it cannot be bound.
        """
        with self._lock:
            held = attempt.ports()
            if held.get(SERVING) == port:
                return
            holder = self._holder(port)
            problem = _why_unbindable(port) if holder is None else f"it is reserved for {holder.key}"
            if problem is not None:
                raise PortTaken(
                    f"port {port} of the document cannot be used on this machine: {problem}. Leave out the port and"
                    " listen on $MIZZEN_PORT, or run the agent as root with cgroup v2, so that it can map the port"
                )
            attempt.save_ports(held | {SERVING: port})
            self._known()[port] = attempt

    def unreserved(self, seed: str) -> int:
        """Returns a port of the range that no attempt has reserved and that can be bound now. It is not reserved.

        The search starts at a hash of `seed`.

        Raises:
            NoFreePort: there is none.
        """
        start = zlib.crc32(seed.encode())
        with self._lock:
            for step in range(self._size):
                port = self._first + (start + step) % self._size
                if self._holder(port) is None and self._free(port):
                    return port
        raise NoFreePort(f"none of the ports {self._first} to {self._first + self._size - 1} is free")

    def _holder(self, port: int) -> AttemptFolder | None:
        """Returns the attempt whose reservation of a port is valid, or None. Reads the folder of at most one."""
        holder = self._known().get(port)
        return None if holder is None or not holder.path.exists() or self._state.is_over(holder) else holder

    def _known(self) -> dict[int, AttemptFolder]:
        if self._holders is None:
            self._holders = {port: one for one in self._state.unfinished() for port in one.ports().values()}
        return self._holders


def _why_unbindable(port: int) -> str | None:
    """Returns why a server cannot bind the port; None: it can. Old connections in TIME_WAIT do not prevent it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
    return None
