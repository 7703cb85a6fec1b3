"""A region's bid for one workload (MAST 4.3): a plan for the whole gang with its quality, or the reasons for none."""

from domain.scheduling import Bid, JobPlacement, PlacementRequest, Plan, RegionSnapshot
from rms.criteria import quality
from rms.gang import Planner, undoing
from rms.plans import SEVERAL, JobPlan, Stuck
from rms.refusal import refusal
from rms.region import Region
from rms.surplus import without_surplus


def bid(snapshot: RegionSnapshot, request: PlacementRequest) -> Bid:
    """Bids on a snapshot: `bid_in` for those who have no columns at hand."""
    return bid_in(Planner(Region.of(snapshot)), request)


def bid_in(planner: Planner, request: PlacementRequest) -> Bid:
    """Bids on a planner's region. Evicts nobody and takes nothing: the award does, if the region's facts still hold.

    The plan is for all jobs or there is none; it uses what is free and what its victims hold, and none of the victims
    can be dropped from it. Victims are listed by id. The same region in any order gives the same bid.

    What the request displaces counts as over-quota, so it is evicted before others of its rank.
    """
    if not request.displaces:
        return _bid(planner, request)
    with planner.region.demoted(request.displaces, request.rank):
        return _bid(planner, request)


def _bid(planner: Planner, request: PlacementRequest) -> Bid:
    region = planner.region
    protected = planner.begin(request)
    with undoing(region) as undo:
        planned = planner.gang(request, protected, undo)
        if isinstance(planned, Stuck):
            return Bid(request.workload, region.name, None, tuple(refusal(planner, request, planned, protected)))
    final = without_surplus(planner, planned)
    plan = Plan(
        request.workload,
        region.name,
        tuple(_placement(region, job) for job in final.jobs),
        tuple(sorted(region.running[victim] for victim in final.victims)),
        quality(region.holders, final),
    )
    return Bid(request.workload, region.name, plan)


def _placement(region: Region, plan: JobPlan) -> JobPlacement:
    ids = region.ids
    machines = tuple((ids[row], tasks) for row, tasks in zip(plan.rows.tolist(), plan.tasks.tolist(), strict=True))
    gpu_type = plan.job.gpu_types[plan.preference] if plan.job.gpus_per_task else None
    numbers = region.clusters_of(plan.rows) if plan.cluster == SEVERAL else [plan.cluster]
    return JobPlacement(plan.job.name, "+".join(region.clusters[number] for number in numbers), gpu_type, machines)
