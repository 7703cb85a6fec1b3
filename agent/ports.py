"""Reserves ports for the rendezvous of jobs whose task 0 runs on this machine, and for a task that serves requests."""

import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterable

from agent.state import AttemptFolder

SERVING = "serving port"
"""Holder of the port on which a task serves requests. No job can have this name."""
_reserving = threading.Lock()


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


def reserve(
    attempt: AttemptFolder,
    jobs: Iterable[str],
    ports: tuple[int, int],
    others: Iterable[AttemptFolder],
    free: Callable[[int], bool] = bindable,
) -> dict[str, int]:
    """Reserves one port in `ports` (first and last, inclusive) for each of `jobs`, and returns the ports by job.

    Idempotent: the same attempt and job get the same port again. `SERVING` can take the place of a job. `others` are
    the attempts whose reservations are still valid. The search starts at a hash of attempt and job, so a leftover task
    of an earlier attempt rarely connects to this one. Machines that share an address need disjoint ranges, because an
    agent sees only its own reservations.

    Raises:
        NoFreePort: no port in the range is free.
        TooManyPorts: there are more jobs than ports in the range.
    """
    jobs = list(jobs)
    if len(set(jobs)) > ports[1] - ports[0] + 1:
        raise TooManyPorts(
            f"{attempt.key} needs {len(set(jobs))} ports on this machine; its range is {ports[0]} to {ports[1]}"
        )
    with _reserving:
        held = attempt.ports()
        taken = {port for other in (*others, attempt) for port in other.ports().values()}
        first, last = ports
        size = last - first + 1
        for job in sorted(set(jobs) - held.keys()):
            start = zlib.crc32(f"{attempt.key}.{job}".encode())
            candidates = (first + (start + step) % size for step in range(size))
            port = next((p for p in candidates if p not in taken and free(p)), None)
            if port is None:
                holder = job if job == SERVING else f"job {job}"
                raise NoFreePort(f"{holder} of {attempt.key}: none of the ports {first} to {last} is free")
            held[job] = port
            taken.add(port)
        attempt.save_ports(held)
        return {job: held[job] for job in jobs}


def reserve_fixed(attempt: AttemptFolder, port: int, others: Iterable[AttemptFolder]) -> None:
    """Reserves exactly `port` for the attempt's task that serves. Idempotent. `others` is as for `reserve`.

    Raises:
        PortTaken: another attempt has reserved the port, or it cannot be bound.
    """
    with _reserving:
        held = attempt.ports()
        if held.get(SERVING) == port:
            return
        holder = next((other.key for other in others if port in other.ports().values()), None)
        if holder is None:
            problem = _why_unbindable(port)
        else:
            problem = f"it is reserved for {holder}"
        if problem is not None:
            raise PortTaken(
                f"port {port} of the document cannot be used on this machine: {problem}. Leave out the port and listen"
                " on $MIZZEN_PORT, or run the agent as root with cgroup v2, so that it can map the port"
            )
        attempt.save_ports(held | {SERVING: port})


def _why_unbindable(port: int) -> str | None:
    """Returns why a server cannot bind the port; None: it can. Old connections in TIME_WAIT do not prevent it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
    return None
