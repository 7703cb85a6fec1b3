"""What is free on the machines of clusters, without the state of a scheduler."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.scheduling import JobRequest
from reclaim.destinations import DEFAULT_RULES

_FREE = text(
    "select region || '/' || cluster, gpu_type, gpus - bit_count((held | promised | withheld)::bit(64)) as free_gpus,"
    " free_cpus_milli, free_memory_bytes, count(*) from machine"
    " where (region, cluster) in (select * from unnest(cast(:regions as text[]), cast(:clusters as text[])))"
    " and state = 'ready' and cordon is null and not draining"
    " group by region, cluster, gpu_type, free_gpus, free_cpus_milli, free_memory_bytes"
    " order by region, cluster, gpu_type, free_gpus, free_cpus_milli, free_memory_bytes"
)


class _Free(NamedTuple):
    """What is free on a machine."""

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
        """Returns what is free beside a task of the job."""
        return _Free(
            self.gpu_type,
            self.gpus - job.gpus_per_task,
            self.cpus_milli - job.cpus_milli_per_task,
            self.memory_bytes - job.memory_bytes_per_task,
        )


class Room:
    """What is free in some clusters, each named `region/cluster`."""

    def __init__(self, session: Session, clusters: Collection[str]) -> None:
        self._free: dict[str, dict[_Free, int]] = defaultdict(dict)
        """Number of machines by what is free on them: the machines of a cluster are alike."""
        self._found: dict[tuple[object, ...], int] = {}
        parts = [cluster.partition("/") for cluster in sorted(clusters)]
        values = {"regions": [region for region, _, _ in parts], "clusters": [name for _, _, name in parts]}
        for place, *free, machines in session.execute(_FREE, values) if parts else ():
            self._free[place][_Free(*free)] = machines

    def candidates(self, job: JobRequest, cluster: str) -> int:
        """Returns how many machines of the cluster have room for a task of the job, at most k_min.

        More make no difference, and the same number again finds the cached scores. Most jobs of a batch have few
        shapes, so that few comparisons are needed.
        """
        shape = job.gpu_types, job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task
        found = self._found.get((cluster, *shape))
        if found is None:
            found = 0
            for free, machines in self._free[cluster].items():
                if free.fits(job):
                    found += machines
                if found >= DEFAULT_RULES.min_local:
                    break
            found = self._found[cluster, *shape] = min(found, DEFAULT_RULES.min_local)
        return found

    def take(self, jobs: Sequence[JobRequest], cluster: str) -> bool:
        """Takes the room for all tasks of the jobs in the cluster; returns False, and takes nothing, if it lacks room.

        Large tasks choose first, each the machine with the least room. So it may miss the only way to pack the tasks.
        """
        left = dict(self._free[cluster])
        for job in sorted(jobs, key=lambda job: (-job.gpus_per_task, -job.cpus_milli_per_task)):
            for _ in range(job.tasks):
                free = min((one for one in left if one.fits(job)), key=lambda one: one[1:], default=None)
                if free is None:
                    return False
                left[free] -= 1
                if not left[free]:
                    del left[free]
                rest = free.less(job)
                left[rest] = left.get(rest, 0) + 1
        self._free[cluster] = left
        self._found.clear()
        return True
