"""The simulator's own account of what each workload holds, independent of the columns that the scheduler decides on.

A plan that takes capacity that another workload holds is an error, so a double allocation always fails the run.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from domain.scheduling import Holding, JobRequest, MachineState, Plan
from simulation.errors import SimulationError

Amounts = tuple[int, int, int]
"""GPUs, thousandths of a core, bytes of memory."""
NOTHING: Amounts = (0, 0, 0)


def plus(a: Amounts, b: Amounts) -> Amounts:
    """Returns the sum of two amounts."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def minus(a: Amounts, b: Amounts) -> Amounts:
    """Returns the difference of two amounts."""
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def least(a: Amounts, b: Amounts) -> Amounts:
    """Returns the smaller amount of each resource."""
    return min(a[0], b[0]), min(a[1], b[1]), min(a[2], b[2])


def needs(plan: Plan, jobs: Iterable[JobRequest]) -> dict[str, Amounts]:
    """Returns the amounts that a plan takes, by machine."""
    out: dict[str, Amounts] = {}
    for placement, job in zip(plan.jobs, jobs, strict=True):
        for machine, tasks in placement.machines:
            share = tasks * job.gpus_per_task, tasks * job.cpus_milli_per_task, tasks * job.memory_bytes_per_task
            out[machine] = plus(out.get(machine, NOTHING), share)
    return out


class Ledger:
    """One region's machines: the free amounts, what each workload holds, and what its victims still owe it."""

    def __init__(self, machines: Iterable[MachineState]) -> None:
        self.machines = {m.id: m for m in machines}
        self.free: dict[str, Amounts] = {
            m.id: (m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) for m in self.machines.values()
        }
        self.held: dict[str, dict[str, Amounts]] = {}
        """Amounts that a workload holds, by workload and machine."""
        self._owed: dict[str, dict[str, Amounts]] = {}
        """Amounts that victims still have to hand over to their evictor, by evictor and machine."""
        self._evictor: dict[str, str] = {}
        self._closed: set[str] = set()
        """Machines that accept no new workloads."""
        self.gpus: dict[str, int] = defaultdict(int)
        """All slots by GPU type; of closed machines, only the slots that are held."""
        self.free_gpus: dict[str, int] = defaultdict(int)
        """Free slots of open machines, by GPU type."""
        for m in self.machines.values():
            self._count(m.id, m.gpus, m.free_gpus)

    def join(self, machine: MachineState) -> None:
        """Adds a machine, all of it free.

        Raises:
            SimulationError: the region has a machine with this id.
        """
        if machine.id in self.machines:
            raise SimulationError(f"machine {machine.id} exists already")
        self.machines[machine.id] = machine
        self.free[machine.id] = machine.gpus, machine.cpus_milli, machine.memory_bytes
        self._count(machine.id, machine.gpus, machine.gpus)

    def close(self, machine: str) -> list[str]:
        """Closes a machine: it accepts no new workloads, and is removed once no workload holds resources of it.

        Returns:
            The workloads that hold resources of the machine, sorted by id.
        """
        free = self.free[machine]
        self._count(machine, -free[0], -free[0])
        self._closed.add(machine)
        holders = sorted(workload for workload, held in self.held.items() if any(held.get(machine, NOTHING)))
        self._forget_if_empty(machine)
        return holders

    def is_idle(self, machine: str) -> bool:
        """Returns whether no workload holds resources of a machine; a machine that was removed is idle."""
        m = self.machines.get(machine)
        return m is None or self.free[machine] == (m.gpus, m.cpus_milli, m.memory_bytes)

    def is_open(self, machine: str) -> bool:
        """Returns whether a machine exists and accepts new workloads."""
        return machine in self.machines and machine not in self._closed

    def is_leaving(self, workload: str) -> bool:
        """Returns whether a workload holds, or is owed, resources of a closed machine."""
        parts = (self.held.get(workload, {}), self._owed.get(workload, {}))
        return any(machine in self._closed and any(amounts) for part in parts for machine, amounts in part.items())

    def hold(self, workload: str, holdings: Iterable[Holding], taken: bool = False) -> None:
        """Records what a workload holds at the start of the run.

        `taken`: the free amounts of the machines exclude its holdings already.

        Raises:
            SimulationError: the workload holds more of a machine than is free.
        """
        held = {h.machine: (h.gpus, h.cpus_milli, h.memory_bytes) for h in holdings}
        self.held[workload] = held
        for machine, amounts in () if taken else held.items():
            self._shift(machine, amounts, -1)

    def award(self, plan: Plan, jobs: Iterable[JobRequest]) -> None:
        """Gives a workload the free amounts of its plan; the plan's victims owe it the rest.

        Raises:
            SimulationError: the plan needs more than the free amounts and its victims' holdings together, or uses a
                closed machine, or evicts a workload that another plan evicts already.
        """
        owed: dict[str, Amounts] = {}
        held: dict[str, Amounts] = {}
        for machine, need in needs(plan, jobs).items():
            if not self.is_open(machine):
                raise SimulationError(f"{plan.workload} is placed on {machine}, which accepts no new workloads")
            taken = least(need, self.free[machine])
            self._shift(machine, taken, -1)
            held[machine] = taken
            rest = minus(need, taken)
            given = NOTHING
            for victim in plan.victims:
                given = plus(given, self.held[victim].get(machine, NOTHING))
            if min(minus(given, rest)) < 0:
                raise SimulationError(f"{plan.workload} needs {rest} of {machine}, and its victims hold {given}")
            if any(rest):
                owed[machine] = rest
        for victim in plan.victims:
            if victim in self._evictor:
                raise SimulationError(f"{plan.workload} evicts {victim}, which {self._evictor[victim]} evicts already")
            self._evictor[victim] = plan.workload
        self.held[plan.workload], self._owed[plan.workload] = held, owed

    def leave(self, workload: str) -> None:
        """Releases all resources that a workload holds: its evictor gets what it is owed, and the rest becomes free.

        Raises:
            SimulationError: the workload is still owed resources by its own victims.
        """
        if self.is_owed(workload):
            raise SimulationError(f"{workload} leaves before its victims have left")
        self._owed.pop(workload, None)
        evictor = self._evictor.pop(workload, None)
        owed = self._owed.get(evictor, {}) if evictor is not None else {}
        for machine, amounts in self.held.pop(workload).items():
            passed = least(amounts, owed.get(machine, NOTHING))
            if evictor is not None and any(passed):
                self.held[evictor][machine] = plus(self.held[evictor].get(machine, NOTHING), passed)
                owed[machine] = minus(owed[machine], passed)
            self._shift(machine, minus(amounts, passed), 1)
            self._forget_if_empty(machine)

    def is_owed(self, workload: str) -> bool:
        """Returns whether victims of a workload still have to hand over some of its slots."""
        return any(any(amounts) for amounts in self._owed.get(workload, {}).values())

    def holdings(self, workload: str) -> tuple[Holding, ...]:
        """Returns what a workload holds, sorted by machine id."""
        return tuple(Holding(machine, *amounts) for machine, amounts in sorted(self.held[workload].items()))

    def state(self, machine: str) -> MachineState:
        """Returns the state of a machine with its present free amounts."""
        gpus, cpus, memory = self.free[machine]
        return replace(self.machines[machine], free_gpus=gpus, free_cpus_milli=cpus, free_memory_bytes=memory)

    def check(self) -> None:
        """Checks that the free and held amounts of each machine add up to its size.

        Raises:
            SimulationError: the amounts of a machine do not add up, or a free amount is negative.
        """
        total: dict[str, Amounts] = dict(self.free)
        for held in self.held.values():
            for machine, amounts in held.items():
                total[machine] = plus(total[machine], amounts)
        for id_, m in self.machines.items():
            if total[id_] != (m.gpus, m.cpus_milli, m.memory_bytes) or min(self.free[id_]) < 0:
                raise SimulationError(f"machine {id_}: {self.free[id_]} free, {total[id_]} free and held together")

    def _shift(self, machine: str, amounts: Amounts, sign: int) -> None:
        before = self.free[machine]
        now = plus(before, amounts) if sign > 0 else minus(before, amounts)
        if min(now) < 0:
            raise SimulationError(f"machine {machine} has {before} free, but {amounts} are taken")
        self.free[machine] = now
        change = now[0] - before[0]
        self._count(machine, *((-change, 0) if machine in self._closed else (0, change)))

    def _count(self, machine: str, gpus: int, free: int) -> None:
        gpu_type = self.machines[machine].gpu_type
        if gpu_type is not None:
            self.gpus[gpu_type] += gpus
            self.free_gpus[gpu_type] += free

    def _forget_if_empty(self, machine: str) -> None:
        if machine in self._closed and self.is_idle(machine):
            self._closed.remove(machine)
            del self.machines[machine], self.free[machine]
