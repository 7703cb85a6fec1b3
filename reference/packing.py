"""Free resources, the machines that a job may use, and the packing of its tasks: the plain version of `rms.packing`."""

from collections.abc import Iterable
from dataclasses import replace

from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
from domain.spread import SpreadLevel
from reference.criteria import PlacementTarget, Spread

Free = dict[str, tuple[int, int, int]]
"""Maps machine ids to free GPUs, CPUs (thousandths of a core) and memory (bytes)."""


def free_now(snapshot: RegionSnapshot) -> Free:
    """Returns the amounts that are free now."""
    return {m.id: (m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) for m in snapshot.machines}


def without_room(machine: MachineState) -> MachineState:
    """Returns a machine of which nothing is free, even if all its workloads are evicted."""
    return replace(
        machine,
        free_gpus=machine.free_gpus - machine.gpus,
        free_cpus_milli=machine.free_cpus_milli - machine.cpus_milli,
        free_memory_bytes=machine.free_memory_bytes - machine.memory_bytes,
    )


def release(free: Free, victims: list[RunningWorkload] | tuple[RunningWorkload, ...]) -> Free:
    """Returns the free amounts after the victims have released their holdings."""
    released = dict(free)
    for victim in victims:
        for held in victim.holdings:
            if held.machine in released:
                gpus, cpus, memory = released[held.machine]
                released[held.machine] = (gpus + held.gpus, cpus + held.cpus_milli, memory + held.memory_bytes)
    return released


def take(free: Free, job: JobRequest, spread: Spread) -> Free:
    """Returns the free amounts after tasks of a job were placed."""
    left = dict(free)
    for machine, tasks in spread.items():
        gpus, cpus, memory = left[machine]
        left[machine] = (
            gpus - tasks * job.gpus_per_task,
            cpus - tasks * job.cpus_milli_per_task,
            memory - tasks * job.memory_bytes_per_task,
        )
    return left


def cluster_targets(snapshot: RegionSnapshot, job: JobRequest) -> list[PlacementTarget]:
    """Returns the options within one cluster: each cluster with each GPU type of the job."""
    places = []
    allowed = _allowed(snapshot, job)
    for cluster in sorted({m.dynamic_cluster for m in allowed}):
        machines = tuple(m for m in allowed if m.dynamic_cluster == cluster)
        if job.gpus_per_task == 0:
            places.append(
                PlacementTarget(cluster, None, 0, (tuple(m for m in machines if m.gpu_type is None), machines))
            )
            continue
        for preference, gpu_type in enumerate(job.gpu_types):
            places.append(
                PlacementTarget(cluster, gpu_type, preference, (tuple(m for m in machines if m.gpu_type == gpu_type),))
            )
    if job.topology.preferred in (SpreadLevel.MACHINE, SpreadLevel.RACK):
        places += [replace(place, together=True) for place in places]
    return places


def _allowed(snapshot: RegionSnapshot, job: JobRequest) -> tuple[MachineState, ...]:
    """Returns the machines whose capacity kind the job accepts."""
    return tuple(m for m in snapshot.machines if m.capacity in job.capacity)


def spanning_targets(snapshot: RegionSnapshot, job: JobRequest) -> list[PlacementTarget]:
    """Returns the options that treat all clusters as one; empty if the job must stay in one cluster."""
    if not job.span_clusters:
        return []
    allowed = _allowed(snapshot, job)
    required, preferred = job.topology.required, job.topology.preferred
    scopes = [] if required is SpreadLevel.ZONE else [allowed]
    if SpreadLevel.ZONE in (required, preferred):
        scopes += [tuple(m for m in allowed if m.zone == zone) for zone in sorted({m.zone for m in allowed})]
    if job.gpus_per_task == 0:
        return [PlacementTarget("", None, 0, (tuple(m for m in s if m.gpu_type is None), s)) for s in scopes]
    return [
        PlacementTarget("", gpu_type, preference, (tuple(m for m in scope if m.gpu_type == gpu_type),))
        for scope in scopes
        for preference, gpu_type in enumerate(job.gpu_types)
    ]


def tasks_that_fit(job: JobRequest, amounts: tuple[int, int, int]) -> int:
    """Returns how many tasks of a job fit into free amounts of one machine."""
    wanted = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    return max(0, min(amount // want for amount, want in zip(amounts, wanted, strict=True) if want))


def most_tasks(job: JobRequest, machines: Iterable[MachineState], free: Free, *, together: bool = False) -> int:
    """Returns how many tasks fit on some machines, if tasks that stay together do."""
    room = _room(job, machines, free, together)
    return sum(_capacity(job, members, room, together) for members in _racks(list(machines)).values())


def _room(job: JobRequest, machines: Iterable[MachineState], free: Free, together: bool) -> dict[str, int]:
    many = job.topology.tasks_by(SpreadLevel.MACHINE, job.tasks, prefers=together)
    return {m.id: tasks_that_fit(job, free[m.id]) // many * many for m in machines}


def _capacity(job: JobRequest, rack: list[MachineState], room: dict[str, int], together: bool) -> int:
    many = job.topology.tasks_by(SpreadLevel.RACK, job.tasks, prefers=together)
    return sum(room[m.id] for m in rack) // many * many


def place_job(job: JobRequest, place: PlacementTarget, free: Free) -> Spread | None:
    """Returns the numbers of tasks by machine, of the first list of machines into which all fit; None: they do not."""
    for machines in place.attempts:
        if most_tasks(job, machines, free, together=place.together) >= job.tasks:
            return _pack(job, list(machines), free, place.together)
    return None


def _pack(job: JobRequest, machines: list[MachineState], free: Free, together: bool) -> Spread:
    room, tasks = _room(job, machines, free, together), job.tasks
    spread: Spread = {}
    while True:
        one = _on_one_machine(job, tasks, machines, room, free)
        if one is not None:
            return {**spread, **one}
        racks = _racks(machines)
        sizes = {rack: _capacity(job, members, room, together) for rack, members in racks.items()}
        options = []
        for rack, members in racks.items():
            option = _within_rack(job, tasks, members, room, free)
            if option is not None:
                options.append((len(option), sizes[rack], rack, option))
        if options:
            return {**spread, **min(options, key=lambda option: option[:3])[3]}
        largest = min(racks, key=lambda rack: (-sizes[rack], rack))
        whole = _within_rack(job, sizes[largest], racks[largest], room, free)
        assert whole is not None
        spread |= whole
        tasks -= sizes[largest]
        machines = [m for m in machines if _rack(m) != largest]


def _rack(machine: MachineState) -> tuple[str, str, str]:
    """Returns the rack; one with machines of several dynamic clusters counts as one for each of them."""
    return machine.cluster, machine.rack, machine.pool


def _racks(machines: list[MachineState]) -> dict[tuple[str, str, str], list[MachineState]]:
    names = sorted(set(map(_rack, machines)))
    return {rack: [m for m in machines if _rack(m) == rack] for rack in names}


def _on_one_machine(
    job: JobRequest, tasks: int, machines: list[MachineState], room: dict[str, int], free: Free
) -> Spread | None:
    def tightness(machine: MachineState) -> tuple[int, int, int, str]:
        gpus, cpus, _ = free[machine.id]
        left_gpus, left_cpus = gpus - tasks * job.gpus_per_task, cpus - tasks * job.cpus_milli_per_task
        return (room[machine.id], left_gpus, left_cpus, machine.id)

    fitting = [m for m in machines if room[m.id] >= tasks]
    return {min(fitting, key=tightness).id: tasks} if fitting else None


def _within_rack(
    job: JobRequest, tasks: int, members: list[MachineState], room: dict[str, int], free: Free
) -> Spread | None:
    if sum(room[m.id] for m in members) < tasks:
        return None
    spread: Spread = {}
    left = list(members)
    while True:
        last = _on_one_machine(job, tasks, left, room, free)
        if last is not None:
            return {**spread, **last}
        largest = min(left, key=lambda m: (-room[m.id], free[m.id][0] - room[m.id] * job.gpus_per_task, m.id))
        spread[largest.id] = room[largest.id]
        tasks -= room[largest.id]
        left.remove(largest)
