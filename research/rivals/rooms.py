"""The free capacity for the Slurm and Kueue models: pools of machines of one GPU type in one cluster, as columns."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from domain.criteria import PlanQuality
from domain.scheduling import JobPlacement, JobRequest, MachineState, Plan
from simulation.ledger import Amounts, Ledger

Ints = npt.NDArray[np.int64]
_UNRATED = PlanQuality()
"""The quality of all plans here: without an auction, plans are not compared."""


class ClusterPool:
    """The machines of one GPU type in one cluster; a gang is placed in one pool."""

    def __init__(self, region: str, ledger: Ledger, machines: Sequence[MachineState]) -> None:
        self.region, self.ledger = region, ledger
        self.gpu_type, self.cluster, self.capacity = machines[0].gpu_type, machines[0].cluster, machines[0].capacity
        self.ids = [m.id for m in machines]
        self.row = {id_: row for row, id_ in enumerate(self.ids)}
        self.free: Ints = np.array([ledger.free[id_] for id_ in self.ids], np.int64).T
        """Free GPUs, thousandths of a core and bytes of memory, shape (3, machines)."""
        self.size: Ints = np.array([(m.gpus, m.cpus_milli, m.memory_bytes) for m in machines], np.int64).T

    def refresh(self, machines: Iterable[str]) -> None:
        """Reads the free amounts of these machines from the ledger again."""
        for id_ in machines:
            row = self.row.get(id_)
            if row is not None:
                self.free[:, row] = self.ledger.free[id_]

    def could_hold(self, job: JobRequest) -> bool:
        """Returns whether the pool could hold a job if it were empty."""
        return self.takes(job) and int(tasks_by_machine(self.size, job).sum()) >= job.tasks

    def takes(self, job: JobRequest) -> bool:
        """Returns whether the pool has one of a job's capacity kinds, and its GPU type if the job needs GPUs."""
        return self.capacity in job.capacity and (not job.gpus_per_task or self.gpu_type in job.gpu_types)

    def fits(self, job: JobRequest, free: Ints) -> bool:
        """Returns whether all tasks of a job fit into `free`, shape (3, machines)."""
        return int(tasks_by_machine(free, job).sum()) >= job.tasks

    def plan(self, workload: str, job: JobRequest, free: Ints, victims: Sequence[str] = ()) -> Plan:
        """Returns a best-fit plan: machines with room for the fewest tasks are filled first."""
        most = tasks_by_machine(free, job)
        left, chosen = job.tasks, []
        for row in np.lexsort((np.arange(len(most)), most)).tolist():
            count = min(left, int(most[row]))
            if count:
                chosen.append((self.ids[row], count))
                left -= count
        gpu_type = self.gpu_type if job.gpus_per_task else None
        placement = JobPlacement(job.name, self.cluster, gpu_type, tuple(sorted(chosen)))
        return Plan(workload, self.region, (placement,), tuple(victims), _UNRATED)

    def amounts(self, held: Mapping[str, Amounts]) -> Ints:
        """Returns the part of a workload's holdings that is in this pool, shape (3, machines)."""
        out = np.zeros_like(self.free)
        for machine, amounts in held.items():
            row = self.row.get(machine)
            if row is not None:
                out[:, row] += amounts
        return out


def tasks_by_machine(free: Ints, job: JobRequest) -> Ints:
    """Returns how many tasks of a job fit on each machine; `free` has shape (3, machines)."""
    wants = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    rooms = [free[k] // want for k, want in enumerate(wants) if want]
    most: Ints = np.maximum(np.minimum.reduce(rooms), 0)
    return most


def pools_of(ledgers: Mapping[str, Ledger]) -> dict[str, list[ClusterPool]]:
    """Returns the pools of every region, sorted by (cluster, GPU type)."""
    out: dict[str, list[ClusterPool]] = {}
    for region, ledger in ledgers.items():
        parts: dict[tuple[str, str], list[MachineState]] = {}
        for machine in ledger.machines.values():
            parts.setdefault((machine.cluster, machine.gpu_type or ""), []).append(machine)
        out[region] = [ClusterPool(region, ledger, machines) for _, machines in sorted(parts.items())]
    return out
