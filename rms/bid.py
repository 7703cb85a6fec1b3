"""A region's bid for one workload (MAST 4.3): a plan for the whole gang with its quality, or reasons for a refusal."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from domain.scheduling import Bid, JobPlacement, PlacementRequest, Plan, RegionSnapshot
from rms.gang import Planner, undoing
from rms.plans import SEVERAL, GangPlan, JobPlan, PlanFailure, quality
from rms.refusal import refusal
from rms.region import RegionColumns
from rms.surplus import without_surplus


def bid(snapshot: RegionSnapshot, request: PlacementRequest) -> Bid:
    """Returns the bid of a region that is given as a snapshot; see `bid_in`."""
    return bid_in(Planner(RegionColumns.of(snapshot)), request)


def bid_in(planner: Planner, request: PlacementRequest) -> Bid:
    """Returns the bid of the planner's region. It changes nothing; resources are taken by `rms.award.award`.

    A plan places all jobs. It uses free resources and those of its victims, and no victim can be dropped from it.
    Victims are sorted by id. The bid does not depend on the order in which machines and workloads were added to the
    region.

    Workloads that the request displaces count as over-quota, so they are evicted first. Machines that the request
    avoids have no room for it. If the plan uses machines of a group in `PlacementRequest.left_out`, a plan without the
    group replaces it, unless that is worse by a criterion before `move_s`. If the group's machines make a victim of
    that plan redundant, they are used after all.
    """
    (found, final), avoids = _bid_with(planner, request, request.avoids), request.avoids
    if found.plan is None:
        return found
    for group in request.left_out:
        if not found.plan.uses(group):
            continue
        without, other = _bid_with(planner, request, avoids | group)
        if without.plan is not None and without.plan.quality.before_move <= found.plan.quality.before_move:
            found, final, avoids = without, other, avoids | group
    if final is not None and avoids != request.avoids:
        with _demoting(planner.region, request, request.avoids):
            fewer = without_surplus(planner, final)
            if len(fewer.victims) < len(final.victims):
                found = _bid_of(planner.region, request, fewer)
    return found


@contextmanager
def _demoting(region: RegionColumns, request: PlacementRequest, avoids: frozenset[str]) -> Iterator[None]:
    """While the block runs, displaced workloads count as over-quota, and machines in `avoids` have no room."""
    with region.demoted(request.displaces, request.rank), region.without(avoids):
        yield


def _bid_with(planner: Planner, request: PlacementRequest, avoids: frozenset[str]) -> tuple[Bid, GangPlan | None]:
    """Returns the bid on all machines that are not in `avoids`, and its plan in numbers."""
    if not request.displaces and not avoids:
        return _bid(planner, request)
    with _demoting(planner.region, request, avoids):
        return _bid(planner, replace(request, avoids=avoids))


def _bid(planner: Planner, request: PlacementRequest) -> tuple[Bid, GangPlan | None]:
    region = planner.region
    protected = planner.begin(request)
    with undoing(region) as undo:
        planned = planner.gang(request, protected, undo)
        if isinstance(planned, PlanFailure):
            reasons, retry_at_s = refusal(planner, request, planned, protected)
            return Bid(request.workload, region.name, None, tuple(reasons), retry_at_s=retry_at_s), None
    final = without_surplus(planner, planned)
    return _bid_of(region, request, final), final


def _bid_of(region: RegionColumns, request: PlacementRequest, final: GangPlan) -> Bid:
    plan = Plan(
        request.workload,
        region.name,
        tuple(_placement(region, job) for job in final.jobs),
        tuple(sorted(region.running[victim] for victim in final.victims)),
        quality(region.holders, final),
    )
    return Bid(request.workload, region.name, plan.doubted(request))


def _placement(region: RegionColumns, plan: JobPlan) -> JobPlacement:
    ids = region.ids
    machines = tuple((ids[row], tasks) for row, tasks in zip(plan.rows.tolist(), plan.tasks.tolist(), strict=True))
    gpu_type = plan.job.gpu_types[plan.preference] if plan.job.gpus_per_task else None
    numbers = region.clusters_of(plan.rows) if plan.cluster == SEVERAL else [plan.cluster]
    return JobPlacement(plan.job.name, "+".join(region.clusters[number] for number in numbers), gpu_type, machines)
