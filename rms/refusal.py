"""Reasons why a region has no plan for a workload."""

from collections.abc import Collection, Sequence
from math import inf

from domain.capacity import OWN, USUAL, kind_in_pool, own_of
from domain.reasons import Reason, ReasonCode, in_words
from domain.scheduling import JobRequest, PlacementRequest
from rms.arrays import B1
from rms.gang import Planner
from rms.plans import PlanFailure
from rms.region import RegionColumns
from rms.spread import occupied
from rms.together import groups_of, not_together


def needs(job: JobRequest, there: Collection[str] = USUAL) -> str:
    """Describes the resources that a job needs, for messages.

    The description contains the capacity kinds that the job accepts if they are not the usual ones, or if none of them
    is in `there`, the kinds of a region.
    """
    parts = []
    if job.gpus_per_task:
        gpus = "1 GPU" if job.gpus_per_task == 1 else f"{job.gpus_per_task} GPUs"
        parts.append(f"{gpus} of type {' or '.join(job.gpu_types) or 'none'}")
    if job.cpus_milli_per_task:
        parts.append("1 CPU" if job.cpus_milli_per_task == 1000 else f"{job.cpus_milli_per_task / 1000:g} CPUs")
    if job.memory_bytes_per_task:
        gib = job.memory_bytes_per_task / 2**30
        parts.append(f"{gib:g} GiB of memory" if gib >= 1 else f"{gib * 1024:g} MiB of memory")
    accepted = tuple(dict.fromkeys(map(kind_in_pool, job.capacity)))
    if accepted != USUAL or not set(job.capacity) & set(there):
        kinds = (OWN if kind.startswith(own_of("")) else kind for kind in accepted)
        parts.append(f"on {' or '.join(kinds).replace('_', ' ')} machines")
    for level, tasks in groups_of(job):
        parts.append(f"{'all' if tasks == job.tasks else f'each {tasks}'} of them in one {level}")
    return f"{'1 task' if job.tasks == 1 else f'{job.tasks} tasks, each'} with {', '.join(parts)}"


def no_hardware(planner: Planner, request: PlacementRequest) -> tuple[Reason, ...]:
    """Returns a reason for each job that would not fit even into an empty region."""
    lacking = planner.lacking(request.jobs)
    if not lacking:
        return ()
    region = planner.region
    there = region.capacity_kinds() or USUAL
    reasons = tuple(
        Reason(ReasonCode.NO_HARDWARE, {"region": region.name, "job": job.name, "needs": needs(job, there)})
        for job in lacking
    )
    return *reasons, *in_other_pools(region, lacking[0])


def in_other_pools(region: RegionColumns, job: JobRequest) -> tuple[Reason, ...]:
    """Returns a reason that names the pools whose machines the job could use if they were not for other tenants."""
    pools = region.other_pools(job)
    return (Reason(ReasonCode.IN_OTHER_POOLS, {"region": region.name, "pools": pools}),) if pools else ()


def refusal(
    planner: Planner, request: PlacementRequest, stuck: PlanFailure, protected: B1
) -> tuple[Sequence[Reason], float]:
    """Returns the reasons of a refusal: jobs that would not fit even into an empty region, else the first stuck job.

    The reason for a stuck job contains `placeable`, the most of its tasks that one GPU type of one cluster could take
    after the earlier jobs and after evicting all evictable workloads, and `evictable`, the number of those workloads in
    the region. If a minimum runtime alone protects further workloads on machines that the gang may use, the reason
    contains the first end of one. `own` is the number of workloads in the region that the request spares because they
    are its own tenant's (`rms.own_tenant`). Other reasons name a level of the topology that has no room, and the
    machines that the request avoids.

    The second result is the `retry_at_s` of the bid.
    """
    region = planner.region
    lacking = no_hardware(planner, request)
    if lacking:
        return lacking, inf
    job = stuck.job
    detail = {
        "region": region.name,
        "job": job.name,
        "tasks": job.tasks,
        "placeable": planner.most_now(job, request.rank, protected),
        "evictable": planner.evictable,
    }
    retry_at_s = planner.protected_until_s(request)
    if retry_at_s < inf:
        detail["protected_until"] = in_words(retry_at_s)
    if request.spares:
        detail["own"] = len(request.spares)
    also, again_s = waits(request, region)
    others = *in_other_pools(region, job), *not_together(region, job, request.rank, protected)
    return (Reason(ReasonCode.INSUFFICIENT_CAPACITY, detail), *others, *also), min(retry_at_s, again_s)


def waits(request: PlacementRequest, region: RegionColumns) -> tuple[Sequence[Reason], float]:
    """Returns reasons for the machines that a request may not use now, and the earliest time at which that changes.

    These are the machines that it avoids, of those that are open in the region.
    """
    reasons, again_s = list[Reason](), inf
    if request.too_open and (too_open := sorted(filter(region.is_open, request.too_open))):
        reasons.append(Reason(ReasonCode.ISOLATION_TOO_WEAK, {"region": region.name, "machines": too_open}))
    if request.no_engine and (no_engine := sorted(filter(region.is_open, request.no_engine))):
        reasons.append(Reason(ReasonCode.NO_CONTAINER_ENGINE, {"region": region.name, "machines": no_engine}))
    if (rule := request.spread) is not None and request.too_close:
        there = sorted("/".join(name) or "(without a name)" for name in occupied(region, rule, rule.over))
        detail = {"region": region.name, "level": rule.over.value, "places": there}
        reasons.append(Reason(ReasonCode.SPREAD_REQUIRED, detail))
    known = request.too_open | request.no_engine | request.too_close
    failed = request.avoids - known if request.avoids else None
    if failed and (avoided := sorted(filter(region.is_open, failed))):
        again_s = request.avoids_until_s
        until = {"until": in_words(again_s)} if again_s < inf else {}
        reasons.append(Reason(ReasonCode.MACHINES_AVOIDED, {"region": region.name, "machines": avoided, **until}))
    return reasons, again_s
