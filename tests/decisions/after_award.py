"""Computes the snapshot of a region right after an award, before the victims have left."""

from dataclasses import dataclass, field, replace

from domain.scheduling import (
    Holding,
    JobRequest,
    MachineState,
    PlacementRequest,
    Plan,
    RegionSnapshot,
    RunningWorkload,
)


@dataclass
class _Amounts:
    gpus: int = 0
    cpus_milli: int = 0
    memory_bytes: int = 0

    def add(self, gpus: int, cpus_milli: int, memory_bytes: int) -> None:
        self.gpus += gpus
        self.cpus_milli += cpus_milli
        self.memory_bytes += memory_bytes


@dataclass
class _Share:
    """The part of a plan on one machine."""

    needs: _Amounts = field(default_factory=_Amounts)
    released: _Amounts = field(default_factory=_Amounts)


def after_award(snapshot: RegionSnapshot, plan: Plan, request: PlacementRequest) -> RegionSnapshot:
    """Returns the snapshot right after the award of `plan` to `request`.

    On each machine the workload first takes free resources; the rest is promised from the holdings of the plan's
    victims. The victims keep their holdings and cannot be evicted again; the part of their holdings beyond the promise
    (the surplus) is available to no workload until they release it. The workload is added to the running workloads with
    the resources that it already holds; it started now and is not evictable. So the sum of free and held resources of
    each machine does not change.

    Raises:
        ValueError: the plan does not belong to the request, places too few or too many tasks, names a machine or victim
            that the snapshot lacks or that may not be evicted, or needs more of a machine than is free there and held
            by its victims.
    """
    _check(snapshot, plan, request)
    jobs = {job.name: job for job in request.jobs}
    victims = set(plan.victims)
    shares = _shares(snapshot, plan, jobs)
    machines: list[MachineState] = []
    holdings: list[Holding] = []
    for machine in snapshot.machines:
        if machine.id not in shares:
            machines.append(machine)
            continue
        needs, released = shares[machine.id].needs, shares[machine.id].released
        gpus = _take(machine.id, "GPUs", needs.gpus, machine.free_gpus, released.gpus)
        cpus_milli = _take(
            machine.id, "thousandths of a CPU", needs.cpus_milli, machine.free_cpus_milli, released.cpus_milli
        )
        memory_bytes = _take(
            machine.id, "bytes of memory", needs.memory_bytes, machine.free_memory_bytes, released.memory_bytes
        )
        machines.append(
            replace(
                machine,
                free_gpus=machine.free_gpus - gpus,
                free_cpus_milli=machine.free_cpus_milli - cpus_milli,
                free_memory_bytes=machine.free_memory_bytes - memory_bytes,
            )
        )
        if gpus or cpus_milli or memory_bytes or request.spread is not None:
            holdings.append(Holding(machine.id, gpus, cpus_milli, memory_bytes))
    running = [replace(w, evictable=False) if w.id in victims else w for w in snapshot.running]
    group = None if request.spread is None else request.spread.group
    running.append(
        RunningWorkload(
            plan.workload, request.rank, snapshot.now_s, tuple(holdings), None, evictable=False, group=group
        )
    )  # fmt: skip
    return replace(snapshot, machines=tuple(machines), running=tuple(running))


def _check(snapshot: RegionSnapshot, plan: Plan, request: PlacementRequest) -> None:
    if (plan.workload, plan.region) != (request.workload, snapshot.region):
        raise ValueError(
            f"plan is for workload {plan.workload!r} in region {plan.region!r}, not for {request.workload!r} in"
            f" {snapshot.region!r}"
        )
    placed = [placement.job for placement in plan.jobs]
    wanted = [job.name for job in request.jobs]
    if placed != wanted:
        raise ValueError(f"plan places the jobs {placed}, but the request has the jobs {wanted}")
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        job.sized(sum(count for _, count in placement.machines))
    ranks = {w.id: w.rank for w in snapshot.running if w.evictable and w.id not in request.may_not_evict}
    for victim in plan.victims:
        if ranks.get(victim, 0) <= request.rank:
            raise ValueError(
                f"victim {victim!r} is not an evictable running workload below rank {request.rank} in region"
                f" {snapshot.region!r}"
            )


def _shares(snapshot: RegionSnapshot, plan: Plan, jobs: dict[str, JobRequest]) -> dict[str, _Share]:
    known = {machine.id for machine in snapshot.machines}
    shares: dict[str, _Share] = {}
    for placement in plan.jobs:
        job = jobs[placement.job]
        for machine, tasks in placement.machines:
            if machine not in known:
                raise ValueError(f"plan uses machine {machine!r}, which region {snapshot.region!r} does not have")
            needs = shares.setdefault(machine, _Share()).needs
            needs.add(tasks * job.gpus_per_task, tasks * job.cpus_milli_per_task, tasks * job.memory_bytes_per_task)
    for workload in snapshot.running:
        if workload.id in plan.victims:
            for held in workload.holdings:
                if held.machine in shares:
                    shares[held.machine].released.add(held.gpus, held.cpus_milli, held.memory_bytes)
    return shares


def _take(machine: str, resource: str, needs: int, free: int, released: int) -> int:
    """Returns the part of `needs` that free resources cover."""
    taken = min(needs, max(free, 0))
    if needs - taken > released:
        raise ValueError(
            f"machine {machine!r} has {free} {resource} free and {released} held by the plan's victims, but the plan"
            f" needs {needs}"
        )
    return taken
