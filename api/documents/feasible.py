"""Whether any region could ever hold a gang, if nothing else ran: what would have to change, in one line."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from domain.capacity import CapacityKind
from domain.spec import JobSpec, WorkloadSpec


@dataclass(frozen=True)
class Machines:
    """`count` equal machines of a cluster; those that are busy, cordoned or drained count like others."""

    region: str
    cluster: str
    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int
    count: int
    capacity: str = CapacityKind.RESERVED.value

    def tasks(self, job: JobSpec) -> int:
        """How many of a job's tasks they hold if nothing else is there."""
        task = job.resources
        if task.gpus and self.gpu_type not in task.gpu_types:
            return 0
        parts = (self.gpus, task.gpus), (self.cpus_milli, task.cpus_milli), (self.memory_bytes, task.memory_bytes)
        return self.count * min((have // need for have, need in parts if need), default=job.tasks)


def never(spec: WorkloadSpec, fleet: Iterable[Machines]) -> str | None:
    """Why no region could ever hold the gang as the fleet is, and what would have to change; None: one might.

    A job's tasks are on one GPU type, and in one cluster unless it spans clusters; the gang is in one region. Jobs are
    looked at one by one, then together by their sums of each resource: what is said never to fit does not.
    """
    regions: dict[str, list[Machines]] = defaultdict(list)
    kinds: set[str] = set()
    for machines in fleet:
        if spec.allows_region(machines.region):
            kinds.add(machines.capacity)
            if machines.capacity in spec.kinds:
                regions[machines.region].append(machines)
    if kinds and not regions:
        asked, there = (", ".join(names) for names in (spec.kinds, sorted(kinds)))
        return f"no region has machines of the kinds {asked}, there are {there}; name one of these under capacity"
    if not regions:
        return None
    for job in spec.jobs:
        most = {name: _most(job, here) for name, here in sorted(regions.items())}
        best = max(sorted(most), key=lambda name: most[name])
        if most[best] < job.tasks:
            spread = _most(job.model_copy(update={"span_clusters": True}), regions[best])
            return _too_many(job, best, most[best], spread)
    lacks = {name: _lacks(spec.jobs, here) for name, here in sorted(regions.items())}
    if any(lack is None for lack in lacks.values()):
        return None
    told = "; ".join(f"{name} {lack}" for name, lack in lacks.items())
    return f"no region can hold all jobs together even if nothing else runs: {told}; ask for less, or add machines"


def _most(job: JobSpec, here: Sequence[Machines]) -> int:
    """The most tasks of a job that a region's clusters could hold as the job may be spread."""
    sums: dict[tuple[str, str | None], int] = defaultdict(int)
    for m in here:
        sums["" if job.span_clusters else m.cluster, m.gpu_type if job.resources.gpus else None] += m.tasks(job)
    return max(sums.values(), default=0)


def _too_many(job: JobSpec, region: str, most: int, spread: int) -> str:
    one = "its clusters together hold" if job.span_clusters else "one cluster of it holds"
    ways = [f"ask for at most {most} tasks" if most else "ask for less for each task"]
    if not job.span_clusters and spread >= job.tasks:
        ways.append(f"set span_clusters: true (all clusters of {region} hold {spread})")
    ways.append("add machines")
    tasks = f"{job.tasks} task{'' if job.tasks == 1 else 's'}"
    return (
        f"no region can hold job {job.name} with {tasks} even if nothing else runs: at most {most} fit, in {region}, "
        f"where {one} that many; {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _lacks(jobs: Sequence[JobSpec], here: Sequence[Machines]) -> str | None:
    """Of which resource a region has less in all than the jobs ask for in all; None: of none."""
    types = {m.gpu_type for m in here if m.gpus}
    wanted: Mapping[str, int] = {
        gpu_type: sum(j.tasks * j.resources.gpus for j in jobs if j.resources.gpu_types == (gpu_type,))
        for gpu_type in sorted(t for t in types if t is not None)
    }
    for gpu_type, gpus in wanted.items():
        there = sum(m.count * m.gpus for m in here if m.gpu_type == gpu_type)
        if there < gpus:
            return f"has {there} {gpu_type} and {gpus} are asked for"
    for unit, has, asked in (
        ("GPUs", sum(m.count * m.gpus for m in here), sum(j.tasks * j.resources.gpus for j in jobs)),
        ("CPUs", sum(m.count * m.cpus_milli for m in here) / 1000, sum(_cpus(j) for j in jobs)),
        ("GiB of memory", sum(m.count * m.memory_bytes for m in here) / 2**30, sum(_gib(j) for j in jobs)),
    ):
        if has < asked:
            return f"has {has:g} {unit} and {asked:g} are asked for"
    return None


def _cpus(job: JobSpec) -> float:
    return job.tasks * job.resources.cpus_milli / 1000


def _gib(job: JobSpec) -> float:
    return job.tasks * job.resources.memory_bytes / 2**30
