"""Free resources, the machines that a job may use, and the packing of its tasks: the plain version of `rms.packing`."""

from dataclasses import replace

from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
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
    return places


def _allowed(snapshot: RegionSnapshot, job: JobRequest) -> tuple[MachineState, ...]:
    """Returns the machines whose capacity kind the job accepts."""
    return tuple(m for m in snapshot.machines if m.capacity in job.capacity)


def spanning_targets(snapshot: RegionSnapshot, job: JobRequest) -> list[PlacementTarget]:
    """Returns the options that treat all clusters as one; empty if the job must stay in one cluster."""
    if not job.span_clusters:
        return []
    allowed = _allowed(snapshot, job)
    if job.gpus_per_task == 0:
        return [PlacementTarget("", None, 0, (tuple(m for m in allowed if m.gpu_type is None), allowed))]
    return [
        PlacementTarget("", gpu_type, preference, (tuple(m for m in allowed if m.gpu_type == gpu_type),))
        for preference, gpu_type in enumerate(job.gpu_types)
    ]


def tasks_that_fit(job: JobRequest, amounts: tuple[int, int, int]) -> int:
    """Returns how many tasks of a job fit into free amounts of one machine."""
    wanted = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    return max(0, min(amount // want for amount, want in zip(amounts, wanted, strict=True) if want))


def place_job(job: JobRequest, place: PlacementTarget, free: Free) -> Spread | None:
    """Returns the numbers of tasks by machine, of the first list of machines into which all fit; None: they do not."""
    for machines in place.attempts:
        spread = _pack(job, job.tasks, list(machines), free)
        if spread is not None:
            return spread
    return None


def _pack(job: JobRequest, tasks: int, machines: list[MachineState], free: Free) -> Spread | None:
    room = {m.id: tasks_that_fit(job, free[m.id]) for m in machines}
    if sum(room.values()) < tasks:
        return None
    spread: Spread = {}
    while True:
        one = _on_one_machine(job, tasks, machines, room, free)
        if one is not None:
            return {**spread, **one}
        racks = _racks(machines)
        options = []
        for rack, members in racks.items():
            option = _within_rack(job, tasks, members, room, free)
            if option is not None:
                options.append((len(option), sum(room[m.id] for m in members), rack, option))
        if options:
            return {**spread, **min(options, key=lambda option: option[:3])[3]}
        largest = min(racks, key=lambda rack: (-sum(room[m.id] for m in racks[rack]), rack))
        for machine in racks[largest]:
            if room[machine.id]:
                spread[machine.id] = room[machine.id]
                tasks -= room[machine.id]
        machines = [m for m in machines if (m.cluster, m.rack) != largest]


def _racks(machines: list[MachineState]) -> dict[tuple[str, str], list[MachineState]]:
    names = sorted({(m.cluster, m.rack) for m in machines})
    return {rack: [m for m in machines if (m.cluster, m.rack) == rack] for rack in names}


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
