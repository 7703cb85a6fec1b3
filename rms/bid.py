"""A region's bid for one workload (MAST 4.3): a plan for the whole gang with its quality, or the reasons for none."""

from domain.scheduling import Bid, JobPlacement, PlacementRequest, Plan, PlanQuality, RegionSnapshot
from rms.planning import (
    GangPlan,
    JobPlan,
    Stuck,
    lost_gpu_ms,
    plan_gang,
    victims_by_rank,
    youngest_started_at_s,
)
from rms.refusal import refusal
from rms.region import Region
from rms.surplus import without_surplus


def bid(snapshot: RegionSnapshot, request: PlacementRequest) -> Bid:
    """Bids on a snapshot. Evicts nobody and takes nothing: the award does, if the snapshot's facts still hold.

    The plan is for all jobs or there is none; it uses what is free and what its victims hold, and none of the victims
    can be dropped from it. Victims are listed by id. The same snapshot in any order gives the same bid.
    """
    return bid_in(Region.of(snapshot), request)


def bid_in(region: Region, request: PlacementRequest) -> Bid:
    """Bids on a snapshot that is laid out already, for several requests on the same one."""
    snapshot = region.snapshot
    planned = plan_gang(region, request)
    if isinstance(planned, Stuck):
        return Bid(request.workload, snapshot.region, None, tuple(refusal(region, request, planned)))
    final = without_surplus(region, planned)
    plan = Plan(
        request.workload,
        snapshot.region,
        tuple(_placement(region, job) for job in final.jobs),
        tuple(sorted(victim.workload.id for victim in final.victims)),
        _quality(region, final),
    )
    return Bid(request.workload, snapshot.region, plan)


def _placement(region: Region, plan: JobPlan) -> JobPlacement:
    machines = tuple((region.machines[position].id, tasks) for position, tasks in plan.machines)
    return JobPlacement(plan.job.name, plan.group.cluster, plan.group.gpu_type, machines)


def _quality(region: Region, plan: GangPlan) -> PlanQuality:
    return PlanQuality(
        victims_by_rank(plan.victims),
        lost_gpu_ms(region, plan.victims) / 1000,
        youngest_started_at_s(plan.victims),
        sum(job.group.preference for job in plan.jobs),
        sum(job.racks for job in plan.jobs),
        sum(len(job.machines) for job in plan.jobs),
    )
