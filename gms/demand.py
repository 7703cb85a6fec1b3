"""What workloads ask for, as columns: each distinct gang of jobs is kept once and named by a number.

Queues repeat themselves: a million workloads ask for a few thousand different things. So a row of the queue holds one
number, and what it stands for is laid out in flat arrays that the scan's kernels walk.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from domain.scheduling import JobRequest

Ints = npt.NDArray[np.int64]
Gang = tuple[JobRequest, ...]


class DemandColumns(NamedTuple):
    """All distinct gangs, flat. Gang g's envelope is `envelope_*[envelope_at[g]:envelope_at[g + 1]]`, and so on.

    The envelope is what it could take at most of each GPU type, whichever of their types its jobs get. `job_*` has its
    jobs in order (GPU slots of all tasks; 0: a job without GPUs), `type_of` the types of each, most preferred first.
    """

    cpus_milli: Ints
    envelope_at: Ints
    envelope_type: Ints
    envelope_gpus: Ints
    job_at: Ints
    job_gpus: Ints
    type_at: Ints
    type_of: Ints


class HoldingColumns(NamedTuple):
    """All distinct holdings, flat. Holding h's GPUs are `gpus[at[h]:at[h + 1]]` of the types at the same places."""

    cpus_milli: Ints
    at: Ints
    gpu_type: Ints
    gpus: Ints


class Gangs:
    """Numbers for gangs and for GPU types. Numbers are never taken back."""

    def __init__(self) -> None:
        self.types: dict[str, int] = {}
        """GPU type to number."""
        self._names: list[str] = []
        self._numbers: dict[Gang, int] = {}
        self._gangs: list[Gang] = []
        self._flat: tuple[list[int], ...] = ([], [0], [], [], [0], [], [0], [])
        self._demand: DemandColumns | None = None

    def __len__(self) -> int:
        return len(self._gangs)

    def __getitem__(self, number: int) -> Gang:
        """The jobs that a number stands for."""
        return self._gangs[number]

    def type_number(self, gpu_type: str) -> int:
        """The number of a GPU type."""
        number = self.types.setdefault(gpu_type, len(self.types))
        if number == len(self._names):
            self._names.append(gpu_type)
        return number

    def type_name(self, number: int) -> str:
        """The GPU type that a number stands for."""
        return self._names[number]

    def number(self, jobs: Gang) -> int:
        """The number of a gang of jobs."""
        known = self._numbers.get(jobs)
        if known is not None:
            return known
        number = self._numbers[jobs] = len(self._gangs)
        self._gangs.append(jobs)
        self._add(jobs)
        self._demand = None
        return number

    def _add(self, jobs: Gang) -> None:
        cpus, envelope_at, envelope_type, envelope_gpus, job_at, job_gpus, type_at, type_of = self._flat
        cpus.append(sum(job.cpus_milli for job in jobs))
        need: dict[int, int] = {}
        for job in jobs:
            job_gpus.append(job.gpus if job.gpu_types else 0)
            type_of.extend(self.type_number(t) for t in job.gpu_types)
            type_at.append(len(type_of))
            for gpu_type in set(job.gpu_types) if job.gpus else ():
                number = self.type_number(gpu_type)
                need[number] = need.get(number, 0) + job.gpus
        envelope_type.extend(need)
        envelope_gpus.extend(need.values())
        envelope_at.append(len(envelope_type))
        job_at.append(len(job_gpus))

    @property
    def demand(self) -> DemandColumns:
        """All gangs so far."""
        if self._demand is None:
            self._demand = DemandColumns(*(np.array(column, np.int64) for column in self._flat))
        return self._demand


class Holdings:
    """Numbers for what placed workloads hold: CPUs and slots of each GPU type. Numbers are never taken back."""

    def __init__(self, gangs: Gangs) -> None:
        self._gangs = gangs
        self._numbers: dict[tuple[object, ...], int] = {}
        self._flat: tuple[list[int], ...] = ([], [0], [], [])

    def number(self, gpus: Mapping[str, int], cpus_milli: int) -> int:
        """The number of what is held."""
        held = tuple((self._gangs.type_number(t), slots) for t, slots in sorted(gpus.items()) if slots)
        known = self._numbers.setdefault((cpus_milli, held), len(self._numbers))
        cpus, at, types, slots_of = self._flat
        if known == len(cpus):
            cpus.append(cpus_milli)
            types.extend(number for number, _ in held)
            slots_of.extend(slots for _, slots in held)
            at.append(len(types))
        return known

    @property
    def held(self) -> HoldingColumns:
        """All holdings so far."""
        return HoldingColumns(*(np.array(column, np.int64) for column in self._flat))
