"""Resource requests as columns: each distinct gang of jobs is stored once and has a number.

Queues contain many identical requests: a million workloads have a few thousand distinct gangs. A row of the queue
therefore stores one gang number. The gangs are stored in flat arrays that the scan kernels read.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from domain.scheduling import JobRequest

Ints = npt.NDArray[np.int64]
Gang = tuple[JobRequest, ...]


class DemandColumns(NamedTuple):
    """All distinct gangs in flat arrays.

    The envelope of gang g is `envelope_*[envelope_at[g]:envelope_at[g + 1]]`: the most slots of each GPU type that the
    gang could take. The jobs of gang g are `job_gpus[job_at[g]:job_at[g + 1]]`: the slots of all tasks of the job,
    0 for a job without GPUs. The GPU types of job j are `type_of[type_at[j]:type_at[j + 1]]`, most preferred first.
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
    """All distinct holdings in flat arrays.

    Holding h has `gpus[at[h]:at[h + 1]]` slots of the types `gpu_type[at[h]:at[h + 1]]`.
    """

    cpus_milli: Ints
    at: Ints
    gpu_type: Ints
    gpus: Ints


class Gangs:
    """Assigns numbers to gangs and to GPU types. Numbers are never reused."""

    def __init__(self) -> None:
        self.types: dict[str, int] = {}
        """Maps GPU types to type numbers."""
        self._names: list[str] = []
        self._numbers: dict[Gang, int] = {}
        self._gangs: list[Gang] = []
        self._flat: tuple[list[int], ...] = ([], [0], [], [], [0], [], [0], [])
        self._demand: DemandColumns | None = None
        self.elastic: list[int] = []
        """The numbers of the gangs that are elastic; these have one job."""

    def __len__(self) -> int:
        return len(self._gangs)

    def __getitem__(self, number: int) -> Gang:
        """Returns the jobs of the gang that has the given number."""
        return self._gangs[number]

    def type_number(self, gpu_type: str) -> int:
        """Returns the number of a GPU type; a new type gets the next number."""
        number = self.types.setdefault(gpu_type, len(self.types))
        if number == len(self._names):
            self._names.append(gpu_type)
        return number

    def type_name(self, number: int) -> str:
        """Returns the GPU type that has the given number."""
        return self._names[number]

    def number(self, jobs: Gang) -> int:
        """Returns the number of a gang; a new gang gets the next number."""
        known = self._numbers.get(jobs)
        if known is not None:
            return known
        number = self._numbers[jobs] = len(self._gangs)
        self._gangs.append(jobs)
        if any(job.is_elastic for job in jobs):
            self.elastic.append(number)
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
        """Columns of all gangs numbered so far."""
        if self._demand is None:
            self._demand = DemandColumns(*(np.array(column, np.int64) for column in self._flat))
        return self._demand


class Holdings:
    """Assigns numbers to the distinct holdings of placed workloads: CPUs, and slots of each GPU type.

    Numbers are never reused.
    """

    def __init__(self, gangs: Gangs) -> None:
        self._gangs = gangs
        self._numbers: dict[tuple[object, ...], int] = {}
        self._flat: tuple[list[int], ...] = ([], [0], [], [])

    def number(self, gpus: Mapping[str, int], cpus_milli: int) -> int:
        """Returns the number of a holding; a new holding gets the next number."""
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
        """Columns of all holdings numbered so far."""
        return HoldingColumns(*(np.array(column, np.int64) for column in self._flat))
