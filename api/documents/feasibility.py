"""Checks whether any region could hold a gang if nothing else ran, and explains what would have to change."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from domain.capacity import OWN, CapacityKind
from domain.spec import JobSpec, WorkloadSpec
from domain.spread import SpreadLevel


@dataclass(frozen=True)
class EqualMachines:
    """`count` equal machines of a cluster, including busy, cordoned and drained ones."""

    region: str
    cluster: str
    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int
    count: int
    capacity: str = CapacityKind.RESERVED.value

    def tasks(self, job: JobSpec) -> int:
        """Returns how many tasks of a job fit on these machines if they are empty."""
        task = job.resources
        if task.gpus and self.gpu_type not in task.gpu_types:
            return 0
        parts = (self.gpus, task.gpus), (self.cpus_milli, task.cpus_milli), (self.memory_bytes, task.memory_bytes)
        many = 1 if job.topology is None else job.topology.tasks_by(SpreadLevel.MACHINE, job.tasks)
        fit = min((have // need for have, need in parts if need), default=job.tasks)
        return self.count * (fit // many * many)


def never(spec: WorkloadSpec, fleet: Iterable[EqualMachines]) -> str | None:
    """Returns why no region of the current fleet can hold the gang, and what would have to change; None: one might.

    A job's tasks need one GPU type, and one cluster unless the job spans clusters; the gang needs one region. Jobs are
    checked one by one, then together by the sum of each resource. These conditions are necessary, not sufficient: a
    gang that is refused here never fits. A tenant can bring machines at any time, so nothing is refused if the gang
    accepts its own.
    """
    if OWN in (spec.capacity or ()):
        return None
    regions: dict[str, list[EqualMachines]] = defaultdict(list)
    kinds: set[str] = set()
    for machines in fleet:
        if spec.allows_region(machines.region):
            kinds.add(machines.capacity)
            if machines.capacity in spec.kinds:
                regions[machines.region].append(machines)
    if kinds and not regions:
        asked, there = (", ".join(names) for names in (spec.kinds, sorted(kinds)))
        return f"no region has machines of the kinds {asked}; existing kinds: {there}; name one in `capacity`"
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
    return f"no region can hold all jobs together even if nothing else runs: {told}; request less, or add machines"


def _most(job: JobSpec, here: Sequence[EqualMachines]) -> int:
    """Returns how many tasks of a job fit into one cluster or, if the job spans clusters, into the region."""
    sums: dict[tuple[str, str | None], int] = defaultdict(int)
    for m in here:
        sums["" if job.span_clusters else m.cluster, m.gpu_type if job.resources.gpus else None] += m.tasks(job)
    return max(sums.values(), default=0)


def _too_many(job: JobSpec, region: str, most: int, spread: int) -> str:
    one = "all clusters" if job.span_clusters else "one cluster"
    ways = [f"request at most {most} tasks" if most else "request less for each task"]
    if not job.span_clusters and spread >= job.tasks:
        ways.append(f"set span_clusters: true (all clusters of {region} together hold {spread})")
    ways.append("add machines")
    tasks = f"{job.tasks} task{'' if job.tasks == 1 else 's'}"
    return (
        f"no region can hold job {job.name} with {tasks} even if nothing else runs: at most {most} fit, in {one} of "
        f"{region}; {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _lacks(jobs: Sequence[JobSpec], here: Sequence[EqualMachines]) -> str | None:
    """Returns which resource of a region is too small for all jobs together; None: every resource is sufficient."""
    types = {m.gpu_type for m in here if m.gpus}
    wanted: Mapping[str, int] = {
        gpu_type: sum(j.tasks * j.resources.gpus for j in jobs if j.resources.gpu_types == (gpu_type,))
        for gpu_type in sorted(t for t in types if t is not None)
    }
    for gpu_type, gpus in wanted.items():
        there = sum(m.count * m.gpus for m in here if m.gpu_type == gpu_type)
        if there < gpus:
            return f"has {there} {gpu_type}, but {gpus} are needed"
    for unit, has, asked in (
        ("GPUs", sum(m.count * m.gpus for m in here), sum(j.tasks * j.resources.gpus for j in jobs)),
        ("CPUs", sum(m.count * m.cpus_milli for m in here) / 1000, sum(_cpus(j) for j in jobs)),
        ("GiB of memory", sum(m.count * m.memory_bytes for m in here) / 2**30, sum(_gib(j) for j in jobs)),
    ):
        if has < asked:
            return f"has {has:g} {unit}, but {asked:g} are needed"
    return None


def _cpus(job: JobSpec) -> float:
    return job.tasks * job.resources.cpus_milli / 1000


def _gib(job: JobSpec) -> float:
    return job.tasks * job.resources.memory_bytes / 2**30
