"""Reservation of rendezvous ports: one for each job whose task 0 runs on this machine."""

import socket
import threading
import zlib
from collections.abc import Callable, Iterable

from agent.state import AttemptFolder

_reserving = threading.Lock()


class NoFreePort(Exception):
    """Every port of the machine's range is reserved or in use."""


class TooManyPorts(Exception):
    """An attempt wants more ports on this machine than its range has."""


def bindable(port: int) -> bool:
    """Whether the port can be bound on all addresses right now. Not where connections of its last owner linger."""
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
    """A port of `ports` (first and last, inclusive) for each of `jobs`; the same again for the same attempt and job.

    `others` are the attempts whose reservations still hold. The search starts at a place that depends on the attempt,
    so that a stale peer of an earlier one rarely dials into this one. Machines that share an address need ranges of
    their own: an agent knows only its own reservations.

    Raises:
        NoFreePort: the range is used up; the message names it.
        TooManyPorts: `jobs` are more than the range has ports.
    """
    jobs = list(jobs)
    if len(set(jobs)) > ports[1] - ports[0] + 1:
        raise TooManyPorts(f"{attempt.key} leads {len(set(jobs))} jobs here; the range is {ports[0]} to {ports[1]}")
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
