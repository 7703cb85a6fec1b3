"""Which machines of a group take a job's tasks (MAST 4.3): as few machines and racks as it can, as tight as it can.

Whole machines first for tasks that fill one, best fit below that, so that small tasks do not break up idle machines.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from domain.scheduling import JobRequest
from rms.region import Free

_UNLIMITED = 1 << 62


class Room(NamedTuple):
    """A machine with room for at least one of a job's tasks."""

    capacity: int
    """Number of tasks that fit."""
    free_gpus: int
    free_cpus_milli: int
    rack: str
    machine: int
    """Position in the region."""


def capacity(job: JobRequest, gpus: int, cpus_milli: int, memory_bytes: int) -> int:
    """Number of the job's tasks that fit into free resources: never below 0, even where a machine is overdrawn."""
    return max(
        0,
        min(
            gpus // job.gpus_per_task if job.gpus_per_task else _UNLIMITED,
            cpus_milli // job.cpus_milli_per_task if job.cpus_milli_per_task else _UNLIMITED,
            memory_bytes // job.memory_bytes_per_task if job.memory_bytes_per_task else _UNLIMITED,
        ),
    )


def rooms(job: JobRequest, free: Free, machines: Iterable[int], racks: Sequence[str]) -> list[Room]:
    """The machines that have room for some of the job's tasks."""
    found = []
    for m in machines:
        gpus, cpus_milli = free.gpus[m], free.cpus_milli[m]
        fit = capacity(job, gpus, cpus_milli, free.memory_bytes[m])
        if fit:
            found.append(Room(fit, gpus, cpus_milli, racks[m], m))
    return found


def pack(tasks: int, found: Iterable[Room]) -> list[tuple[int, int]]:
    """Distributes `tasks` (at least 1) over rooms of one cluster that suffice: (position, number of tasks) pairs.

    1. One machine, if one holds them all: the one with the smallest capacity, then the fewest GPUs and the least CPU
       left over, then the lowest id.
    2. Else one rack, if one holds them all: the one that needs the fewest machines, then the smallest, then by id.
       Its largest machines (of equal ones those left with the fewest GPUs) are filled until one of the others holds
       what remains; that goes by 1.
    3. Else all of the largest rack (by id if equal), and so on until a rack that is left holds what remains; that goes
       by 1 and 2.
    """
    racks: dict[str, list[Room]] = defaultdict(list)
    for room in found:
        racks[room.rack].append(room)
    size = {rack: sum(room.capacity for room in members) for rack, members in racks.items()}
    left = sorted(racks, key=lambda rack: (-size[rack], rack))
    plan: list[tuple[int, int]] = []
    while size[left[0]] < tasks:
        whole = left.pop(0)
        plan.extend((room.machine, room.capacity) for room in racks[whole])
        tasks -= size[whole]
    single = [room for rack in left for room in racks[rack] if room.capacity >= tasks]
    if single:
        return [*plan, (min(single, key=_tightness).machine, tasks)]
    choices = []
    for rack in left:
        if size[rack] >= tasks:
            part = _within_rack(tasks, racks[rack])
            choices.append((len(part), size[rack], rack, part))
    return plan + min(choices)[3]


def _tightness(room: Room) -> tuple[int, int, int, int]:
    """Orders machines that hold the same tasks. What is free orders like what is left: all give up the same."""
    return (room.capacity, room.free_gpus, room.free_cpus_milli, room.machine)


def _within_rack(tasks: int, members: Iterable[Room]) -> list[tuple[int, int]]:
    left = sorted(members, key=lambda room: (-room.capacity, room.free_gpus, room.machine))
    plan: list[tuple[int, int]] = []
    while left[0].capacity < tasks:
        whole = left.pop(0)
        plan.append((whole.machine, whole.capacity))
        tasks -= whole.capacity
    tightest = min((room for room in left if room.capacity >= tasks), key=_tightness)
    return [*plan, (tightest.machine, tasks)]
