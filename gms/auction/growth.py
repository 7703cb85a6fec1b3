"""Growth: a running elastic workload takes free resources that no waiting workload can use.

It is stopped with a notice and continues from its checkpoint with more tasks. So it grows only if the work of the added
tasks exceeds what the restart costs. Both are in GPU seconds; of a job without GPUs, in task seconds.
"""

from dataclasses import dataclass, replace
from math import inf

from domain.priority import LOWEST_RANK
from domain.scheduling import PlacementRequest, Plan
from rms.bid import bid_in
from rms.consolidation import RESTART_S
from rms.gang import Planner, undoing

HORIZON_S = 3600.0
"""A workload is expected to run for this time or, if that is longer, for as long as it has run; at most until the end
of its maximum runtime."""


@dataclass(frozen=True)
class Grower:
    """A running elastic workload."""

    request: PlacementRequest
    """As for its placement. `most_tasks` of its job is limited by the quota of its tenant."""
    tasks: int
    """The number of tasks that it has."""
    started_at_s: float
    ends_by_s: float = inf
    """When its maximum runtime ends."""

    def pays(self, tasks: int, lost_gpu_s: float, now_s: float) -> bool:
        """Returns whether a restart with `tasks` tasks is worth its cost. `lost_gpu_s`: its work since a checkpoint."""
        expected_s = min(max(now_s - self.started_at_s, HORIZON_S), self.ends_by_s - now_s)
        unit = self.request.jobs[0].gpus_per_task or 1
        gain = (tasks - self.tasks) * unit * (expected_s - RESTART_S)
        return gain > lost_gpu_s + self.tasks * unit * RESTART_S


def growth(planner: Planner, grower: Grower) -> Plan | None:
    """Returns the place of a workload with as many tasks as fit into what it holds and what is free, if that pays.

    None: it cannot grow, it may not be stopped now, or the restart costs more. Nothing is changed.
    """
    region, (job,) = planner.region, grower.request.jobs
    number = region.number(grower.request.workload)
    if number is None or not region.holders.evictable[number] or job.most_tasks <= grower.tasks:
        return None
    region.compute_lost_work()
    lost_gpu_s = float(region.holders.lost_gpu_ms[number]) / 1000
    more = replace(grower.request, rank=LOWEST_RANK, jobs=(replace(job, tasks=grower.tasks + 1),))
    with undoing(region) as undo:
        undo.release(number)
        plan = bid_in(planner, more).plan
    if plan is None or not grower.pays(plan.jobs[0].tasks, lost_gpu_s, region.now_s):
        return None
    return plan
