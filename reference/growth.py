"""Plain reference implementation of `gms.auction.growth`, for tests only."""

from dataclasses import replace

from domain.priority import LOWEST_RANK
from domain.scheduling import Plan, RegionSnapshot
from gms.auction.growth import Grower
from reference import bids
from reference.criteria import lost_gpu_ms

_RESTART_S, _HOUR_S = 300.0, 3600.0


def growth(snapshot: RegionSnapshot, grower: Grower) -> Plan | None:
    """Returns the place with more tasks, on what is free and what the workload holds, if the restart is worth it."""
    own = [w for w in snapshot.running if w.id == grower.request.workload]
    if not own or not own[0].evictable or own[0].protected_until_s > snapshot.now_s:
        return None
    held = {h.machine: (0, 0, 0) for h in own[0].holdings}
    for h in own[0].holdings:
        gpus, cpus_milli, memory_bytes = held[h.machine]
        held[h.machine] = gpus + h.gpus, cpus_milli + h.cpus_milli, memory_bytes + h.memory_bytes
    machines = []
    for m in snapshot.machines:
        gpus, cpus_milli, memory_bytes = held.get(m.id, (0, 0, 0))
        machines.append(
            replace(
                m, free_gpus=m.free_gpus + gpus, free_cpus_milli=m.free_cpus_milli + cpus_milli,
                free_memory_bytes=m.free_memory_bytes + memory_bytes,
            )
        )  # fmt: skip
    without = replace(snapshot, machines=tuple(machines), running=tuple(w for w in snapshot.running if w is not own[0]))
    (job,) = grower.request.jobs
    if job.most_tasks <= grower.tasks:
        return None
    wanted = replace(grower.request, rank=LOWEST_RANK, jobs=(replace(job, tasks=grower.tasks + 1),))
    plan = bids.bid(without, wanted).plan
    if plan is None:
        return None
    tasks, gpus = plan.jobs[0].tasks, max(1, job.gpus_per_task)
    rest_s = min(max(snapshot.now_s - grower.started_at_s, _HOUR_S), grower.ends_by_s - snapshot.now_s)
    gained = (tasks - grower.tasks) * gpus * (rest_s - _RESTART_S)
    lost = lost_gpu_ms(snapshot, own[0]) / 1000 + grower.tasks * gpus * _RESTART_S
    return plan if gained > lost else None
