"""Where a job's tasks go on what is free: the best over all places of the region, and what taking it changes."""

import numpy as np

from domain.compiled import compiled
from rms.arrays import I4, I8
from rms.choices import Choices
from rms.machines import CPUS_MILLI, GPUS, MEBIBYTE, MEMORY_BYTES, NO_TYPE, Machines, shift
from rms.packing import Need, Spread, capacity, keep, measure, pack, rooms

NO_PLAN = -1


@compiled
def take(machines: Machines, need: Need, rows: I4, tasks: I8, sign: int) -> None:
    """Takes what a job's tasks need from their machines, or gives it back where `sign` is -1."""
    for i in range(rows.size):
        n = -sign * tasks[i]
        shift(machines, rows[i], n * need.gpus, n * need.cpus_milli, n * need.memory_bytes)


@compiled
def group_rows(machines: Machines, cluster: int, wanted: int) -> tuple[int, int, int]:
    """Rows from, to, and the end of the first tier, of one cluster's machines that serve a job; none: (0, 0, 0).

    `wanted` is a number of `Region.type_numbers`. A job without GPUs may use every machine of the cluster, but those
    with GPUs only where the others do not suffice.
    """
    first, last = machines.cluster_at[cluster], machines.cluster_at[cluster + 1]
    if wanted == NO_TYPE:
        middle = machines.kind_at[first + 1] if machines.kind_type[first] == NO_TYPE else machines.kind_at[first]
        return machines.kind_at[first], machines.kind_at[last], middle
    for kind in range(first, last):
        if machines.kind_type[kind] == wanted:
            return machines.kind_at[kind], machines.kind_at[kind + 1], machines.kind_at[kind]
    return 0, 0, 0


@compiled
def group_bound(machines: Machines, need: Need, first: int, last: int) -> int:
    """At least as many tasks as fit on the rows `first:last`, which are whole kinds."""
    gpus, cpus_milli, memory_bytes = 0, 0, 0
    for kind in range(machines.kind[first], machines.kind[last - 1] + 1):
        gpus += machines.kind_free[GPUS, kind]
        cpus_milli += machines.kind_free[CPUS_MILLI, kind]
        memory_bytes += machines.kind_free[MEMORY_BYTES, kind]
    return capacity(need, gpus, cpus_milli, memory_bytes)


@compiled
def _roomy(machines: Machines, need: Need, first: int, last: int, out: Spread) -> tuple[int, int]:
    """As `rooms` on what is free in the region. Looks at the coarse columns first, which refuse nearly all.

    What passes is anybody's guess, so nothing up to the rows that pass has a branch for the processor to guess wrong;
    slices from 0 and unsigned places spare the check for negative ones. (Together 2.5 times as fast.)
    """
    gpus, cpus_milli = np.int32(need.gpus), np.int32(min(need.cpus_milli, 2**31 - 1))
    memory_mib = np.int32(need.memory_bytes // MEBIBYTE)
    has_gpus = machines.coarse[GPUS, first:last]
    has_cpus = machines.coarse[CPUS_MILLI, first:last]
    has_memory = machines.coarse[MEMORY_BYTES, first:last]
    passes, room, fit = out.passes, out.room, out.fit
    for i in range(last - first):
        passes[i] = (has_cpus[i] >= cpus_milli) & (has_memory[i] >= memory_mib) & (has_gpus[i] >= gpus)
    passed = np.uint64(0)
    for i in range(last - first):
        room[passed] = first + i
        passed += np.uint64(passes[i])
    tasks = 0
    if need.memory_bytes % MEBIBYTE == 0 and need.cpus_milli < 2**31:
        # Then the coarse columns tell all: rounding down changes no quotient.
        coarse_need = Need(need.gpus, need.cpus_milli, need.memory_bytes // MEBIBYTE, need.tasks)
        for i in range(passed):
            at = room[i] - first
            here = capacity(coarse_need, has_gpus[at], has_cpus[at], has_memory[at])
            fit[i] = here
            tasks += here
        return np.int64(passed), tasks  # type: ignore[return-value]
    free = machines.free
    found = np.uint64(0)
    for i in range(passed):
        row = room[i]
        here = capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
        room[found], fit[found] = row, here
        found += np.uint64(here > 0)
        tasks += here
    return np.int64(found), tasks  # type: ignore[return-value]


@compiled
def roomy_tasks(machines: Machines, need: Need, first: int, last: int) -> int:
    """How many tasks fit on the rows `first:last` of the region."""
    if group_bound(machines, need, first, last) == 0:
        return 0
    free, tasks = machines.free, 0
    cpus_milli = np.int32(min(need.cpus_milli, 2**31 - 1))
    memory_mib = np.int32(need.memory_bytes // MEBIBYTE)
    has_cpus, has_memory = machines.coarse[CPUS_MILLI], machines.coarse[MEMORY_BYTES]
    for row in range(first, last):
        if (has_cpus[row] >= cpus_milli) & (has_memory[row] >= memory_mib):
            tasks += capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
    return tasks


@compiled
def pack_group(
    machines: Machines, need: Need, free: I8, first: int, last: int, middle: int, out: Spread
) -> tuple[int, int]:
    """The job packed into the first tier of a group that holds all of its tasks: numbers of machines and racks.

    The group is the rows `first:last`, its first tier those before `middle`, if there are any. The plan is in
    `out.machine` and `out.tasks`; 0 machines: the group does not hold it.
    """
    found, fits, rest = 0, 0, first
    if first < middle < last:
        found, fits = rooms(need, free, first, middle, out, 0, 0)
        rest = middle
    if fits < need.tasks:
        found, fits = rooms(need, free, rest, last, out, found, fits)
    if fits < need.tasks:
        return 0, 0
    return pack(need.tasks, found, free, machines.rack, machines.by_id, out)


@compiled
def plan_free(machines: Machines, need: Need, choices: Choices, out: Spread) -> tuple[int, int, int, int]:
    """The best plan without evictions: the most preferred class of places, then fewer racks, fewer machines, cluster.

    Returns the class (`NO_PLAN`: there is no plan), its cluster, and its numbers of machines and racks. The plan is in
    `out.best_machine` and `out.best_tasks`.
    """
    best, where, fewest, racks = NO_PLAN, 0, 0, 0
    for preference, wanted in enumerate(choices.type):
        for cluster in range(len(machines.cluster_at) - 1):
            if not choices.allowed[preference, cluster]:
                continue
            first, last, middle = group_rows(machines, cluster, wanted)
            if first == last or group_bound(machines, need, first, last) < need.tasks:
                continue
            found = _found(machines, need, first, last, middle, out)
            if not found:
                continue
            count, spans = measure(
                need.tasks, found, machines.rack, out, len(machines.rack) if best == NO_PLAN else racks
            )
            if count and (best == NO_PLAN or (spans, count) < (racks, fewest)):
                best, where, fewest, racks = preference, cluster, count, spans
        if best != NO_PLAN:
            break
    if best != NO_PLAN:
        first, last, middle = group_rows(machines, where, choices.type[best])
        found = _found(machines, need, first, last, middle, out)
        pack(need.tasks, found, machines.free, machines.rack, machines.by_id, out)
        keep(out, fewest)
    return best, where, fewest, racks


@compiled
def _found(machines: Machines, need: Need, first: int, last: int, middle: int, out: Spread) -> int:
    """The number of rooms, in `out`, of the first tier that holds the job; 0: neither does."""
    found, fits = 0, 0
    if first < middle < last:
        found, fits = _roomy(machines, need, first, middle, out)
    if fits < need.tasks:
        found, fits = _roomy(machines, need, first, last, out)
    return found if fits >= need.tasks else 0


@compiled
def most_ever(machines: Machines, need: Need, choices: Choices, span: bool) -> int:
    """The most of the job's tasks that one cluster (`span`: the region) and type could take if nothing ran."""
    total, most, fits = machines.total, 0, 0
    for number, wanted in enumerate(choices.type):
        if number == 0 or choices.preference[number] != choices.preference[number - 1]:
            fits = 0
        for cluster in range(len(machines.cluster_at) - 1):
            if not choices.allowed[number, cluster]:
                continue
            first, last, _ = group_rows(machines, cluster, wanted)
            if not span:
                fits = 0
            for row in range(first, last):
                fits += capacity(need, total[GPUS, row], total[CPUS_MILLI, row], total[MEMORY_BYTES, row])
            most = max(most, fits)
    return most


@compiled
def hopeful_groups(machines: Machines, need: Need, choices: Choices) -> list[tuple[int, int]]:
    """Rows from and to of the groups that may hold the job, going by their sums."""
    out = [(0, 0) for _ in range(0)]
    for number, wanted in enumerate(choices.type):
        for cluster in range(len(machines.cluster_at) - 1):
            if not choices.allowed[number, cluster]:
                continue
            first, last, _ = group_rows(machines, cluster, wanted)
            if first < last and group_bound(machines, need, first, last) >= need.tasks:
                out.append((first, last))
    return out
