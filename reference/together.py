"""Plain reference implementation of the reasons that name a level without room (`rms.together`)."""

from collections import Counter

from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, RegionSnapshot
from domain.spread import SpreadLevel
from reference.packing import Free, tasks_that_fit


def not_together(snapshot: RegionSnapshot, job: JobRequest, free: Free, most_free: Free) -> list[Reason]:
    """Returns a reason for each level of which no place, or too few, could take the tasks that stay together."""
    rule, reasons = job.topology, []
    groups: list[tuple[SpreadLevel, int]] = []
    if rule.required is not None and (rule.required is not SpreadLevel.ZONE or job.span_clusters):
        groups.append((rule.required, job.tasks))
    if rule.slice_tasks > 1:
        groups.append((rule.slice_level, rule.slice_tasks))
    for level, tasks in groups:
        places, largest, now = 0, 0, 0
        for gpu_type in job.gpu_types if job.gpus_per_task else (None,):
            usable = [m for m in snapshot.machines if m.capacity in job.capacity]
            usable = [m for m in usable if gpu_type in (None, m.gpu_type)]
            sizes = [Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()]
            for m in usable:
                name = {
                    SpreadLevel.MACHINE: (m.id,), SpreadLevel.RACK: (m.cluster, m.rack, m.pool),
                    SpreadLevel.CLUSTER: (m.dynamic_cluster,), SpreadLevel.ZONE: (m.zone,),
                }[level]  # fmt: skip
                for size, amounts in zip(sizes, (free, most_free), strict=True):
                    size[name] += tasks_that_fit(job, amounts[m.id])
            places = max(places, sum(size // tasks for size in sizes[1].values()))
            largest, now = max(largest, *sizes[1].values(), 0), max(now, *sizes[0].values(), 0)
        if places < job.tasks // tasks:
            detail = {
                "region": snapshot.region, "job": job.name, "level": level.value, "tasks": tasks,
                "groups": job.tasks // tasks, "places": places, "largest": largest, "free": now,
            }  # fmt: skip
            reasons.append(Reason(ReasonCode.NOT_TOGETHER, detail))
    return reasons
