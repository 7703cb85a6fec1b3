"""Reserves rendezvous ports: one for each job whose task 0 runs on this machine."""

import socket
import threading
import zlib
from collections.abc import Callable, Iterable

from agent.state import AttemptFolder

_reserving = threading.Lock()


class NoFreePort(Exception):
    """Every port in the machine's range is reserved or in use."""


class TooManyPorts(Exception):
    """An attempt needs more ports on this machine than the machine's range has."""


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

    Idempotent: the same attempt and job get the same port again. `others` are the attempts whose reservations are still
    valid. The search starts at a hash of attempt and job, so a leftover task of an earlier attempt rarely connects to
    this one. Machines that share an address need disjoint ranges, because an agent sees only its own reservations.

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
                raise NoFreePort(f"job {job} of {attempt.key}: none of the ports {first} to {last} is free")
            held[job] = port
            taken.add(port)
        attempt.save_ports(held)
        return {job: held[job] for job in jobs}
