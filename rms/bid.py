"""A region's bid for one workload (MAST 4.3): a plan for the whole gang with its quality, or reasons for a refusal."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from domain.scheduling import Bid, JobPlacement, PlacementRequest, Plan, RegionSnapshot
from rms.arrays import I8
from rms.gang import Planner, undoing
from rms.own_tenant import sparing
from rms.plans import SEVERAL, GangPlan, JobPlan, PlanFailure, quality
from rms.refusal import refusal
from rms.region import RegionColumns
from rms.spread import crowding, keeping_apart
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
    group replaces it, unless that is worse by a criterion before `move_s`. Then the first better plan on less crowded
    machines (`rms.spread`) replaces it, from the least crowded ones on. If the machines that were left out make a
    victim of the plan redundant, they are used after all.

    An elastic job (a gang has at most one job then) gets as many tasks as fit without evictions, or else its fewest.
    """
    request = _largest(planner, sparing(planner.region, keeping_apart(planner.region, request)))
    search = _Search(planner, request)
    made, avoids = search.bid(request.avoids), request.avoids
    if isinstance(made, Bid):
        return made
    for group in request.left_out:
        if not made.plan.uses(group):
            continue
        other = search.bid(avoids | group)
        if isinstance(other, _Made) and other.plan.quality.before_move <= made.plan.quality.before_move:
            made, avoids = other, avoids | group
    least = search.least_crowded(made, avoids)
    if least is not made or avoids != request.avoids:
        with search.leaving_out(request.avoids):
            fewer = without_surplus(planner, least.gang)
            made = least if len(fewer.victims) == len(least.gang.victims) else search.made(fewer)
    return Bid(request.workload, planner.region.name, made.plan)


def _largest(planner: Planner, request: PlacementRequest) -> PlacementRequest:
    """Returns the request with the largest number of tasks for which no eviction is needed; else as it is."""
    job = request.jobs[0]
    if not job.is_elastic:
        return request
    with planner.region.without(request.avoids):
        planner.begin(request)
        more = range(job.tasks + 1, job.most_tasks + 1)
        # If n tasks have no room, n + 1 tasks have none.
        fits = bisect_left(more, True, key=lambda tasks: planner.free(job.sized(tasks)) is None)
    return replace(request, jobs=(job.sized(job.tasks + fits),))


@dataclass(frozen=True)
class _Made:
    """A plan, and the same plan in numbers."""

    plan: Plan
    gang: GangPlan


class _Search:
    """Searches plans for one request, each on other machines of the region."""

    def __init__(self, planner: Planner, request: PlacementRequest) -> None:
        self._planner, self._request = planner, request
        self._crowding = crowding(planner.region, request.spread)

    def bid(self, avoids: frozenset[str], closed: I8 | None = None) -> _Made | Bid:
        """Returns the plan on all machines that are not in `avoids` nor in the rows `closed`, or a refusal."""
        request = self._request
        if not request.displaces and not avoids and closed is None:
            return self._bid(request)
        with self.leaving_out(avoids, closed):
            return self._bid(replace(request, avoids=avoids))

    @contextmanager
    def leaving_out(self, avoids: frozenset[str], closed: I8 | None = None) -> Iterator[None]:
        """While the block runs, displaced workloads count as over-quota, and these machines have no room."""
        region, request = self._planner.region, self._request
        rows = np.array([], np.int64) if closed is None else closed
        with region.demoted(request.displaces, request.rank), region.without(avoids), region.without_rows(rows):
            yield

    def least_crowded(self, made: _Made, avoids: frozenset[str]) -> _Made:
        """Returns the first better plan on less crowded machines, from the least crowded on; else the plan `made`."""
        if self._crowding is not None:
            rows = np.concatenate([job.rows for job in made.gang.jobs])
            for closed in self._crowding.closed_rows(rows):
                other = self.bid(avoids, closed)
                if isinstance(other, _Made) and other.plan.quality.key < made.plan.quality.key:
                    return other
        return made

    def made(self, gang: GangPlan) -> _Made:
        """Returns the plan with its names and its quality."""
        region, rated = self._planner.region, quality(self._planner.region.holders, gang)
        if self._crowding is not None:
            rows = np.concatenate([job.rows for job in gang.jobs])
            rated = replace(rated, crowding=self._crowding.of(rows))
        plan = Plan(
            self._request.workload,
            region.name,
            tuple(_placement(region, job) for job in gang.jobs),
            tuple(sorted(region.running[victim] for victim in gang.victims)),
            rated,
        )
        return _Made(plan.doubted(self._request), gang)

    def _bid(self, request: PlacementRequest) -> _Made | Bid:
        planner, region = self._planner, self._planner.region
        protected = planner.begin(request)
        with undoing(region) as undo:
            planned = planner.gang(request, protected, undo)
            if isinstance(planned, PlanFailure):
                reasons, retry_at_s = refusal(planner, request, planned, protected)
                return Bid(request.workload, region.name, None, tuple(reasons), retry_at_s=retry_at_s)
        return self.made(without_surplus(planner, planned))


def _placement(region: RegionColumns, plan: JobPlan) -> JobPlacement:
    ids = region.ids
    machines = tuple((ids[row], tasks) for row, tasks in zip(plan.rows.tolist(), plan.tasks.tolist(), strict=True))
    gpu_type = plan.job.gpu_types[plan.preference] if plan.job.gpus_per_task else None
    numbers = region.clusters_of(plan.rows) if plan.cluster == SEVERAL else [plan.cluster]
    names = sorted({region.terms(number, None)[0].cluster for number in numbers})
    return JobPlacement(plan.job.name, "+".join(names), gpu_type, machines)
