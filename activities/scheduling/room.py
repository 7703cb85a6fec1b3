"""The free resources on the machines of clusters, without the state of a scheduler."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.scheduling import JobRequest
from reclaim.buildings import DEFAULT_RULES

NO_RATES: Mapping[str, float] = MappingProxyType({})
_FREE = text(
    "select region || '/' || cluster, gpu_type, gpus - bit_count((held | promised | withheld)::bit(64)) as free_gpus,"
    " free_cpus_milli, free_memory_bytes, array_agg(id order by id) from machine"
    " where (region, cluster) in (select * from unnest(cast(:regions as text[]), cast(:clusters as text[])))"
    " and state = 'ready' and cordon is null and not draining"
    " group by region, cluster, gpu_type, free_gpus, free_cpus_milli, free_memory_bytes"
)


class _Free(NamedTuple):
    """The free resources of a machine."""

    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int

    def fits(self, job: JobRequest) -> bool:
        """Returns whether a task of the job fits."""
        return (
            (not job.gpus_per_task or self.gpu_type in job.gpu_types)
            and self.gpus >= job.gpus_per_task
            and self.cpus_milli >= job.cpus_milli_per_task
            and self.memory_bytes >= job.memory_bytes_per_task
        )

    def less(self, job: JobRequest) -> "_Free":
        """Returns the free resources that are left if a task of the job runs on the machine."""
        return _Free(
            self.gpu_type,
            self.gpus - job.gpus_per_task,
            self.cpus_milli - job.cpus_milli_per_task,
            self.memory_bytes - job.memory_bytes_per_task,
        )


class Room:
    """The free resources of some clusters, each named `region/cluster`."""

    def __init__(
        self,
        session: Session,
        clusters: Collection[str],
        rates: Mapping[str, float] = NO_RATES,
        usual: Mapping[str, float] = NO_RATES,
    ) -> None:
        """Reads the free resources.

        Args:
            session: the session.
            clusters: the clusters.
            rates: the expected departures of machines, for the order of the machines in `find`.
            usual: the same for machines without a rate, by cluster.
        """
        self._free: dict[str, dict[str, _Free]] = defaultdict(dict)
        """What is free on each machine. The machines with the fewest expected departures come first."""
        self._candidates: dict[tuple[object, ...], int] = {}
        parts = [cluster.partition("/") for cluster in sorted(clusters)]
        values = {"regions": [region for region, _, _ in parts], "clusters": [name for _, _, name in parts]}
        found: dict[str, dict[str, _Free]] = defaultdict(dict)
        for place, *free, machines in session.execute(_FREE, values) if parts else ():
            found[place].update(dict.fromkeys(machines, _Free(*free)))
        for place, each in found.items():
            unknown = usual.get(place, 0.0)
            order = sorted(each, key=lambda one, unknown=unknown: (rates.get(one, unknown), one))  # type: ignore[misc]
            self._free[place] = {one: each[one] for one in order}

    def machines(self, cluster: str) -> Collection[str]:
        """Returns the machines of a cluster that take work."""
        return self._free[cluster].keys()

    def candidates(self, job: JobRequest, cluster: str) -> int:
        """Returns how many machines of the cluster have room for a task of the job, at most k_min.

        More make no difference, and the same number again finds the cached scores.
        """
        shape = job.gpu_types, job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task
        found = self._candidates.get((cluster, *shape))
        if found is None:
            fitting = (1 for free in self._free[cluster].values() if free.fits(job))
            found = self._candidates[cluster, *shape] = sum(islice(fitting, DEFAULT_RULES.min_local))
        return found

    def find(self, jobs: Sequence[JobRequest], cluster: str, but: Collection[str] = ()) -> dict[str, _Free] | None:
        """Returns the machines that depart most rarely and hold all tasks of the jobs, with what is then free on them.

        Of several GPU types, a job gets the first one that has room. Returns None if the cluster lacks room without the
        machines in `but`. Large tasks choose first, so the only way to pack the tasks may be missed.
        """
        taken: dict[str, _Free] = {}
        for job in sorted(jobs, key=lambda job: (-job.gpus_per_task, -job.cpus_milli_per_task)):
            of_type = [replace(job, gpu_types=(one,)) for one in job.gpu_types] if job.gpus_per_task else [job]
            found = next((found for one in of_type if (found := self._find(one, cluster, but, taken))), None)
            if found is None:
                return None
            taken |= found
        return taken

    def _find(
        self, job: JobRequest, cluster: str, but: Collection[str], taken: Mapping[str, _Free]
    ) -> dict[str, _Free] | None:  # fmt: skip
        found: dict[str, _Free] = {}
        left = job.tasks
        for machine, whole in self._free[cluster].items():
            free = taken.get(machine, whole)
            while left and machine not in but and free.fits(job):
                found[machine] = free = free.less(job)
                left -= 1
            if not left:
                return found
        return None

    def take(self, cluster: str, taken: Mapping[str, _Free]) -> None:
        """Subtracts the resources that `find` has found."""
        self._free[cluster].update(taken)
        self._candidates.clear()
