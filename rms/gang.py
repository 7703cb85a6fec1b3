"""Plans a whole gang (MAST 4.3): job by job, each on the resources that the earlier jobs left free.

A job whose tasks may span clusters (an extension of MAST; see 4.6) is planned on the merged columns of all clusters.
They are needed only if no single cluster can take the job without evictions, and again for the plan with evictions.
They are rebuilt each time, which costs about as much as a few bids, so no state has to be maintained.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from domain.capacity import nano_usd_per_h
from domain.scheduling import JobRequest, PlacementRequest
from domain.spread import SpreadLevel
from rms.arrays import B1, I4, I8
from rms.choices import Choices, spanning
from rms.eviction import (
    Evictable,
    VictimCache,
    VictimSearch,
    first_end_of_protection,
    free_all,
    most_placeable,
    plan_evicting,
)
from rms.job_planner import NO_PLAN, most_ever, plan_free, take
from rms.merged import merged, scopes
from rms.packing import Need, PlanShape, Spread
from rms.plans import OF_VICTIMS, SEVERAL, GangPlan, JobPlan, PlanFailure, need_of, rating_of
from rms.region import RegionColumns


def _needs(job: JobRequest) -> list[Need]:
    """Returns what the job needs, and the same with its tasks in one machine or rack, if it prefers that."""
    alone = need_of(job)
    if job.topology.preferred is None:
        return [alone]
    return list(dict.fromkeys((alone, need_of(job, prefers=True))))


_MEMOS = 64
"""Number of distinct job requests for which victim choices are cached."""


class Planner:
    """Plans gangs on the columns of one region. Each call modifies the columns temporarily and restores them."""

    def __init__(self, region: RegionColumns) -> None:
        self.region = region
        self._size = (-1, -1, -1)
        self._out: Spread
        self._choice: VictimSearch
        self._work: I8
        self._stuck: JobRequest | None = None
        self.evictable = 0
        """Number of workloads that the current request may evict."""
        self._has_enemies = False
        self._spares_of = ""
        """The tenant whose over-quota work the current request spares; empty: it spares none."""
        self._memos: dict[tuple[object, ...], VictimCache] = {}
        self._most_ever: dict[tuple[object, ...], int] = {}
        self._lacking: dict[tuple[JobRequest, ...], tuple[JobRequest, ...]] = {}

    def begin(self, request: PlacementRequest) -> B1:
        """Starts planning a request, and returns a mask of the holders that it may not evict whatever their rank.

        These are holders in their minimum runtime, holders that are not evictable (already being evicted, for example),
        and those in `may_not_evict`.
        """
        self._fit()
        holders, self._has_enemies = self.region.holders, False
        protected = ~holders.evictable
        self._spares_of = request.tenant if request.spares else ""
        for enemy in request.may_not_evict:
            number = self.region.number(enemy)
            if number is not None:
                protected[number] = True
                self._has_enemies |= enemy not in request.spares
        self._stuck = None
        self.evictable = int(np.count_nonzero((holders.rank > request.rank) & ~protected))
        if self.evictable:
            self.region.compute_lost_work()
        return protected

    def _fit(self) -> None:
        """Allocates scratch arrays and clears the caches if the region's size or hardware has changed."""
        size = len(self.region.ids), len(self.region.holders.rank), self.region.hardware
        if size != self._size:
            self._out, self._choice = Spread.of(size[0]), VictimSearch.of(size[1])
            self._work = np.empty((3, size[0]), np.int64)
            self._most_ever.clear()
            self._lacking.clear()
            self._memos.clear()
            self._size = size

    def without_room(self, request: PlacementRequest) -> JobRequest | None:
        """Returns the job on which the last plan for the request failed, if it does not fit even on its own.

        Returns None if it fits on its own, that is, if the earlier jobs of the gang took the resources it needs. The
        region must be in its state before the plan.
        """
        job = self._stuck
        if job is None or job is request.jobs[0] or self.most_now(job, request.rank, self.begin(request)) < job.tasks:
            return job
        return None

    def gang(self, request: PlacementRequest, protected: B1, undo: "Undo") -> GangPlan | PlanFailure:
        """Plans each job with as few evictions as possible. Later jobs can use the resources of earlier jobs' victims.

        All jobs but the last are applied to the region's columns, together with their victims, until `undo` is called.
        """
        plans: list[JobPlan] = []
        for number, job in enumerate(request.jobs, 1):
            plan = self.free(job) or self._evicting(job, request.rank, protected)
            if plan is None:
                self._stuck = job
                return PlanFailure(job)
            plans.append(plan)
            if number < len(request.jobs):
                for victim in plan.victims:
                    undo.release(victim)
                    protected[victim] = True
                undo.take(plan)
        return GangPlan(tuple(plans), tuple(victim for plan in plans for victim in plan.victims))

    def most_ever(self, job: JobRequest) -> int:
        """Returns the most tasks of the job that one cluster and GPU type could hold if the region were empty.

        For a job that may span clusters, it is the most that one GPU type of all clusters together could hold.
        """
        need, span = need_of(job), job.span_clusters
        key = (*need[:3], *need[4:], job.topology.required, job.gpu_types, span, job.capacity)
        if key not in self._most_ever:
            self._most_ever[key] = max(
                int(most_ever(self.region.machines, need, choices, span)) for choices in self._by_zone(job)
            )
        return self._most_ever[key]

    def lacking(self, jobs: tuple[JobRequest, ...]) -> tuple[JobRequest, ...]:
        """Returns the jobs that would not fit even into an empty region."""
        self._fit()
        known = self._lacking.get(jobs)  # A single look-up: the hash and the comparison of jobs are slow.
        if known is None:
            known = self._lacking[jobs] = tuple(job for job in jobs if self.most_ever(job) < job.tasks)
        return known

    def most_now(self, job: JobRequest, rank: int, protected: B1) -> int:
        """Returns the same maximum as `most_ever`, but for the current state after evicting all evictable workloads."""
        columns, need = (self.region.machines, self.region.holders), need_of(job)
        return max(
            int(most_placeable(*columns, protected, rank, need, choices, job.span_clusters, self._work))
            for choices in self._by_zone(job)
        )

    def _by_zone(self, job: JobRequest) -> Iterator[Choices]:
        """Yields the choices of a job: of each zone, if its tasks may span clusters of one zone only; else of all."""
        choices = self.region.choices(job)
        if not (job.span_clusters and job.topology.required is SpreadLevel.ZONE):
            yield choices
            return
        zones = np.array(self.region.zones)
        for zone in sorted(set(self.region.zones)):
            yield choices._replace(allowed=choices.allowed & (zones == zone))

    def protected_until_s(self, request: PlacementRequest) -> float:
        """Returns the first end of a minimum runtime that alone protects a workload from eviction by the request.

        Only workloads on machines that one of the jobs may use count. Infinity: there are none.
        """
        region = self.region
        if not region.has_protected:
            return np.inf
        free_from_s = region.free_from_s
        enemies = [n for n in map(region.number, request.may_not_evict) if n is not None]
        if enemies:
            free_from_s = free_from_s.copy()
            free_from_s[enemies] = np.inf
        columns = region.machines, region.holders, free_from_s, region.now_s, request.rank
        return min(float(first_end_of_protection(*columns, region.choices(job))) for job in request.jobs)

    def free(self, job: JobRequest) -> JobPlan | None:
        """Returns the job's best plan without evictions, in one cluster or else, if allowed, across clusters."""
        choices = self.region.choices(job)
        alone = []
        for need in _needs(job):
            best, cluster, shape = plan_free(self.region.machines, need, choices, self._out)
            if best != NO_PLAN:
                alone.append(self._plan(job, int(choices.preference[best]), cluster, shape))
        if alone or not job.span_clusters:
            return self._best(alone)
        several, one = [], spanning(self.region.type_numbers(job))
        for clusters in scopes(self.region, job, choices.anywhere):
            machines, _, rows = merged(self.region, clusters)
            best, _, shape = plan_free(machines, need_of(job), one, self._out)
            if best != NO_PLAN:
                several.append(self._plan(job, best, SEVERAL, shape, rows=rows))
        return self._best(several)

    def all_free(self, jobs: Sequence[JobRequest]) -> tuple[JobPlan, ...] | None:
        """Plans all jobs in order without evictions; returns None if one of them does not fit."""
        self._fit()
        plans: list[JobPlan] = []
        with undoing(self.region) as undo:
            for job in jobs:
                plan = self.free(job)
                if plan is None:
                    return None
                undo.take(plan)
                plans.append(plan)
        return tuple(plans)

    def _evicting(self, job: JobRequest, rank: int, protected: B1) -> JobPlan | None:
        """Returns the job's best plan with evictions.

        It uses one cluster, or several if the job may span clusters and the victims rate better.
        """
        if not self.evictable:
            return None
        region, choices, below = self.region, self.region.choices(job), Evictable(rank, protected)
        plans = []
        for need in _needs(job):
            memo = self._memo(job, need, rank, len(choices.type))
            best, cluster, shape, victims = plan_evicting(
                region.machines, region.holders, below, need, choices, self._out, self._choice, memo
            )
            if best != NO_PLAN:
                plans.append(self._plan(job, int(choices.preference[best]), cluster, shape, victims))
        one = spanning(region.type_numbers(job))
        for clusters in scopes(self.region, job, choices.anywhere) if job.span_clusters else ():
            machines, holders, rows = merged(region, clusters)
            memo = VictimCache.of(len(one.type), 1)
            best, _, shape, victims = plan_evicting(
                machines, holders, below, need_of(job), one, self._out, self._choice, memo
            )
            if best != NO_PLAN:
                plans.append(self._plan(job, best, SEVERAL, shape, victims, rows))
        return self._best(plans)

    def _best(self, plans: Sequence[JobPlan]) -> JobPlan | None:
        """Returns the best of some plans for one job by the criteria; ties: the first cluster, the first machines."""
        return min(plans, key=self._key) if len(plans) > 1 else plans[0] if plans else None

    def _key(self, plan: JobPlan) -> tuple[object, ...]:
        return (
            rating_of(self.region.holders, plan.victims)[:OF_VICTIMS].tolist(), plan.cluster == SEVERAL, plan.apart,
            plan.preference, plan.capacity_preference, plan.away, plan.move_us, plan.nano_departures_per_h,
            plan.nano_usd_per_h, plan.shape, plan.cluster, self.region.machines.by_id[plan.rows].tolist(),
        )  # fmt: skip

    def _memo(self, job: JobRequest, need: Need, rank: int, classes: int) -> VictimCache:
        """Returns the cached victim choices of identical jobs. The cache is bypassed if the request has evictors.

        Enemies are holders in the region that the request may not evict, except those of its own tenant: which ones
        these are depends on the tenant and the rank only.
        """
        shape = classes, len(self.region.clusters)
        if self._has_enemies:
            return VictimCache.of(*shape)
        key = need, job.gpu_types, job.capacity, job.moves, rank, self._spares_of
        memo = self._memos.pop(key, None) or VictimCache.of(*shape)
        self._memos[key] = memo  # Moved to the end: the cache is LRU.
        if len(self._memos) > _MEMOS:
            del self._memos[next(iter(self._memos))]
        return memo

    def forget(self) -> None:
        """Clears the cache of victim choices, for benchmarks of the search itself."""
        self._memos.clear()

    def _plan(
        self, job: JobRequest, preference: int, cluster: int, shape: PlanShape, victims: int = 0,
        rows: I4 | None = None,
    ) -> JobPlan:  # fmt: skip
        where, tasks = self._out.best_machine[: shape.machines], self._out.best_tasks[: shape.machines]
        if rows is not None:
            where = rows[where]
        order = np.argsort(self.region.machines.by_id[where])
        evicted = tuple(self._choice.best[:victims].tolist())
        where, tasks = where[order], tasks[order]
        terms = self._terms(job, preference, cluster, where, tasks)
        apart = self._is_apart(job, cluster, where, shape)
        return JobPlan(job, preference, cluster, where, tasks, shape, evicted, *terms, apart=apart)

    def _is_apart(self, job: JobRequest, cluster: int, rows: I4, shape: PlanShape) -> int:
        """Returns 1 if the tasks are in several places of the level that the job prefers, else 0."""
        match job.topology.preferred:
            case SpreadLevel.MACHINE:
                places = shape.machines
            case SpreadLevel.RACK:
                places = shape.racks
            case SpreadLevel.CLUSTER:
                places = len(self.region.clusters_of(rows)) if cluster == SEVERAL else 1
            case SpreadLevel.ZONE:
                places = len({self.region.zones[one] for one in self.region.clusters_of(rows)})
            case None:
                places = 1
        return int(places > 1)

    def _terms(
        self, job: JobRequest, preference: int, cluster: int, rows: I4, tasks: I8
    ) -> tuple[int, int, int, int, int]:
        """Returns the index of the capacity kind in the job's list, `Move.away`, the score in microseconds, the
        departures and the price.

        Departures and price are in billionths (of US dollars) per hour. For several clusters, they are sums, and the
        other results are the largest ones.
        """
        gpu_type = job.gpu_types[preference] if job.gpus_per_task else None
        place, away, move_us, departures, price = 0, 0, 0, 0, 0
        for one in [cluster] if cluster != SEVERAL else self.region.clusters_of(rows):
            terms, gpu_usd_per_h = self.region.terms(one, gpu_type)
            here = tasks.sum() if cluster != SEVERAL else tasks[self.region.machines_of(one, rows)].sum()
            place = max(place, job.capacity.index(terms.capacity))
            elsewhere, score_us = job.move_to(self.region.name, terms.cluster)
            away, move_us = max(away, elsewhere), max(move_us, score_us)
            departures += int(here) * terms.nano_departures_per_h
            price += int(here) * nano_usd_per_h(
                job.gpus_per_task, gpu_usd_per_h, job.cpus_milli_per_task, terms.core_usd_per_h
            )
        return place, away, move_us, departures, price


class Undo:
    """Records temporary changes of a region's columns; calling it reverts them."""

    def __init__(self, region: RegionColumns) -> None:
        self._region = region
        self._taken: list[JobPlan] = []
        self._released: list[int] = []

    def take(self, plan: JobPlan) -> None:
        """Takes the resources of a job's tasks."""
        self._take(plan, 1)
        self._taken.append(plan)

    def release(self, victim: int) -> None:
        """Frees the resources of a victim."""
        self._release(victim, 1)
        self._released.append(victim)

    def withhold(self, victim: int) -> None:
        """Reverts `release` for one victim."""
        self._release(victim, -1)
        self._released.remove(victim)

    def _take(self, plan: JobPlan, sign: int) -> None:
        take(self._region.machines, need_of(plan.job), plan.rows, plan.tasks, sign)

    def _release(self, victim: int, sign: int) -> None:
        free_all(self._region.machines, self._region.holders, victim, sign)

    def __call__(self) -> None:
        """Reverts all recorded changes."""
        for plan in self._taken:
            self._take(plan, -1)
        for victim in self._released:
            self._release(victim, -1)
        self._taken.clear()
        self._released.clear()


@contextmanager
def undoing(region: RegionColumns) -> Iterator[Undo]:
    """Yields an `Undo`, and calls it at the end of the block, also after an exception."""
    undo, version = Undo(region), region.machines.version.copy()
    try:
        yield undo
    finally:
        undo()
        region.machines.version[:] = version  # The content is the same as before, so cached results stay valid.
