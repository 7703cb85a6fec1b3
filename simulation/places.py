"""Where workloads of a simulation continue without a wait in the queue: in place, or with what they had and more."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from domain.criteria import PlanQuality
from domain.priority import LOWEST_RANK
from domain.scheduling import Holding, JobPlacement, PlacementRequest, Plan, RunningWorkload
from rms.repair import DamagedGang, repair, shrink
from simulation.engine import Engine, Production
from simulation.ledger import NOTHING, Amounts, Ledger
from simulation.workload_state import WorkloadState


def plan_held(
    state: WorkloadState, region: str, cluster: str, holdings: Iterable[Holding]
) -> tuple[Plan, PlacementRequest] | None:
    """Returns the plan of a workload that holds its slots at the start; None: it has several jobs."""
    if len(state.workload.jobs) > 1:
        return None
    (job,) = state.workload.jobs
    one = job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task
    held = {h.machine: (h.gpus, h.cpus_milli, h.memory_bytes) for h in holdings}
    placed = tuple((machine, _tasks(amounts, one)) for machine, amounts in sorted(held.items()))
    placement = JobPlacement(job.name, cluster, next(iter(state.gpus), None), placed)
    request = PlacementRequest(state.id, LOWEST_RANK, (job,), tenant=state.workload.tenant)
    return Plan(state.id, region, (placement,), (), PlanQuality()), request


def _tasks(amounts: Amounts, one: Amounts) -> int:
    """Returns how many tasks, each of which needs `one`, have these amounts."""
    return min(have // need for have, need in zip(amounts, one, strict=True) if need)


def added_part(plan: Plan, request: PlacementRequest, held: Mapping[str, Amounts]) -> tuple[Plan, PlacementRequest]:
    """Returns the part of a plan for more tasks that its workload does not hold yet."""
    (job,), (placement,) = request.jobs, plan.jobs
    one = job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task
    added = []
    for machine, tasks in placement.machines:
        own = _tasks(held.get(machine, NOTHING), one)
        if tasks > own:
            added.append((machine, tasks - own))
    sized = replace(job, tasks=sum(tasks for _, tasks in added), most_tasks=0)
    part = replace(plan, jobs=(replace(placement, machines=tuple(added)),))
    return part, replace(request, jobs=(sized,))


def repaired(
    state: WorkloadState, ledger: Ledger, engine: Engine, rank: int, immune: frozenset[str], now_s: float
) -> tuple[Plan, PlacementRequest] | None:
    """Returns where a gang that has lost a machine continues in place; None: it returns to the queue.

    It may not evict the workloads that are `immune` to it.
    """
    if state.award is None or not isinstance(engine, Production) or engine.reserves(state.award[0].region, rank):
        return None
    plan, request = state.award
    machines = map(ledger.state, filter(ledger.is_open, ledger.machines))
    request = replace(request, rank=rank, may_not_evict=immune, displaces=frozenset())

    def others() -> Iterator[RunningWorkload]:
        return (one for one in engine.holders(plan.region) if one.id != state.id)

    found = repair(plan.region, machines, DamagedGang(request, plan.jobs), others, now_s)
    return None if found is None else (found, request)


def shrunk(
    state: WorkloadState, ledger: Ledger, engine: Engine, rank: int, waiting: Iterable[WorkloadState]
) -> Plan | None:
    """Returns where an evicted workload that has left continues with fewer tasks; None: it returns to the queue.

    `waiting` are the workloads of better ranks at the head of the queue.
    """
    if state.award is None or not isinstance(engine, Production) or engine.reserves(state.award[0].region, rank):
        return None
    plan, request = state.award
    if not state.workload.jobs[0].is_elastic:
        return None
    here = (one.workload for one in waiting if one.only is None or plan.region in one.only)
    alike = dict.fromkeys((one.jobs, one.tenant) for one in here)
    ahead = (PlacementRequest("", rank, jobs, tenant=tenant) for jobs, tenant in alike)
    machines = map(ledger.state, filter(ledger.is_open, ledger.machines))
    return shrink(plan.region, machines, DamagedGang(replace(request, jobs=state.workload.jobs), plan.jobs), ahead)
