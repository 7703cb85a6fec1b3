"""Plans for a whole gang: its jobs one after another, each on what the earlier ones left (MAST 4.3)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from domain.capacity import nano_usd_per_h
from domain.scheduling import JobRequest, PlacementRequest
from rms.arrays import B1, I4, I8
from rms.choices import spanning
from rms.criteria import OF_VICTIMS, rating_of
from rms.eviction import Choice, Memo, free_all, most_placeable, plan_evicting
from rms.packing import Spread
from rms.planning import NO_PLAN, most_ever, plan_free, take
from rms.plans import SEVERAL, GangPlan, JobPlan, Stuck, need_of
from rms.region import Region
from rms.spanning import merged

_MEMOS = 64
"""Kinds of jobs for which choices of victims are remembered."""


class Planner:
    """Plans on one region's columns, which it changes under way and leaves as they were."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._size = (-1, -1, -1)
        self._out: Spread
        self._choice: Choice
        self._work: I8
        self._stuck: JobRequest | None = None
        self.evictable = 0
        """How many the request at hand may evict."""
        self._has_enemies = False
        self._memos: dict[tuple[object, ...], Memo] = {}
        self._most_ever: dict[tuple[object, ...], int] = {}
        self._lacking: dict[tuple[JobRequest, ...], tuple[JobRequest, ...]] = {}

    def begin(self, request: PlacementRequest) -> B1:
        """Holders that the request may not evict whatever their rank: protected, on the way out, or immune to it."""
        self._fit()
        holders, self._has_enemies = self.region.holders, False
        protected = ~holders.evictable
        for enemy in request.may_not_evict:
            number = self.region.number(enemy)
            if number is not None:
                protected[number] = True
                self._has_enemies = True
        self._stuck = None
        self.evictable = int(np.count_nonzero((holders.rank > request.rank) & ~protected))
        if self.evictable:
            self.region.judge_losses()
        return protected

    def _fit(self) -> None:
        """Scratch of the region's size, and nothing remembered of other hardware."""
        size = len(self.region.ids), len(self.region.holders.rank), self.region.hardware
        if size != self._size:
            self._out, self._choice = Spread.of(size[0]), Choice.of(size[1])
            self._work = np.empty((3, size[0]), np.int64)
            self._most_ever.clear()
            self._lacking.clear()
            self._memos.clear()
            self._size = size

    def without_room(self, request: PlacementRequest) -> JobRequest | None:
        """The job on which the last plan for the request failed, if it has no room by itself either.

        The jobs before it may have taken what it needs; the region is as it was before the plan.
        """
        job = self._stuck
        if job is None or job is request.jobs[0] or self.most_now(job, request.rank, self.begin(request)) < job.tasks:
            return job
        return None

    def gang(self, request: PlacementRequest, protected: B1, undo: "Undo") -> GangPlan | Stuck:
        """Plans each job with as little eviction as it can; what victims give up is free for the jobs after.

        What a job takes and its victims give up is taken and given up in the region until `undo`, where a job follows.
        """
        plans: list[JobPlan] = []
        for number, job in enumerate(request.jobs, 1):
            plan = self.free(job) or self._evicting(job, request.rank, protected)
            if plan is None:
                self._stuck = job
                return Stuck(job)
            plans.append(plan)
            if number < len(request.jobs):
                for victim in plan.victims:
                    undo.release(victim)
                    protected[victim] = True
                undo.take(plan)
        return GangPlan(tuple(plans), tuple(victim for plan in plans for victim in plan.victims))

    def most_ever(self, job: JobRequest) -> int:
        """The largest number of the job's tasks that one cluster and type could take if nothing ran."""
        key = (need_of(job)[:3], job.gpu_types, job.span_clusters, job.capacity)
        if key not in self._most_ever:
            choices = self.region.choices(job)
            self._most_ever[key] = most_ever(self.region.machines, need_of(job), choices, job.span_clusters)
        return self._most_ever[key]

    def lacking(self, jobs: tuple[JobRequest, ...]) -> tuple[JobRequest, ...]:
        """The jobs that no cluster could hold even if nothing ran."""
        self._fit()
        if jobs not in self._lacking:
            self._lacking[jobs] = tuple(job for job in jobs if self.most_ever(job) < job.tasks)
        return self._lacking[jobs]

    def most_now(self, job: JobRequest, rank: int, protected: B1) -> int:
        """The same now, with everybody evicted who may be."""
        region, choices = self.region, self.region.choices(job)
        return int(
            most_placeable(
                region.machines, region.holders, protected, rank, need_of(job), choices, job.span_clusters, self._work
            )
        )

    def free(self, job: JobRequest) -> JobPlan | None:
        """The job's best plan that evicts nobody: in one cluster, else in several if it may."""
        choices = self.region.choices(job)
        best, cluster, count, racks = plan_free(self.region.machines, need_of(job), choices, self._out)
        if best != NO_PLAN:
            return self._plan(job, int(choices.preference[best]), cluster, count, racks)
        if not job.span_clusters:
            return None
        machines, _, rows = merged(self.region, choices.anywhere)
        one = spanning(self.region.type_numbers(job))
        best, _, count, racks = plan_free(machines, need_of(job), one, self._out)
        return None if best == NO_PLAN else self._plan(job, best, SEVERAL, count, racks, rows=rows)

    def all_free(self, jobs: Sequence[JobRequest]) -> tuple[JobPlan, ...] | None:
        """All jobs' plans, nobody evicted, each on what the earlier ones left; None if that does not go."""
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
        """The job's best plan with victims: in one cluster, or in several if it may and that costs less."""
        if not self.evictable:
            return None
        region, need, choices = self.region, need_of(job), self.region.choices(job)
        memo = self._memo(job, rank, len(choices.type))
        best, cluster, count, racks, victims = plan_evicting(
            region.machines, region.holders, protected, rank, need, choices, self._out, self._choice, memo
        )
        alone = None
        if best != NO_PLAN:
            alone = self._plan(job, int(choices.preference[best]), cluster, count, racks, victims)
        if not job.span_clusters:
            return alone
        machines, holders, rows = merged(region, choices.anywhere)
        one = spanning(region.type_numbers(job))
        best, _, count, racks, victims = plan_evicting(
            machines, holders, protected, rank, need, one, self._out, self._choice, Memo.of(len(one.type), 1)
        )
        if best == NO_PLAN:
            return alone
        several = self._plan(job, best, SEVERAL, count, racks, victims, rows)
        if alone is None:
            return several
        ratings = [rating_of(region.holders, plan.victims)[:OF_VICTIMS].tolist() for plan in (alone, several)]
        return alone if ratings[0] <= ratings[1] else several

    def _memo(self, job: JobRequest, rank: int, classes: int) -> Memo:
        """Whom jobs like this one would evict in each cluster, as found before. Not for who may not evict everybody."""
        shape = classes, len(self.region.clusters)
        if self._has_enemies:
            return Memo.of(*shape)
        key = need_of(job), job.gpu_types, job.capacity, rank
        memo = self._memos.pop(key, None) or Memo.of(*shape)
        self._memos[key] = memo  # The last one used is the last one to go.
        if len(self._memos) > _MEMOS:
            del self._memos[next(iter(self._memos))]
        return memo

    def forget(self) -> None:
        """Forgets what was found before, for benches of the search itself."""
        self._memos.clear()

    def _plan(
        self, job: JobRequest, preference: int, cluster: int, count: int, racks: int, victims: int = 0,
        rows: I4 | None = None,
    ) -> JobPlan:  # fmt: skip
        where, tasks = self._out.best_machine[:count], self._out.best_tasks[:count]
        if rows is not None:
            where = rows[where]
        order = np.argsort(self.region.machines.by_id[where])
        evicted = tuple(self._choice.best[:victims].tolist())
        where, tasks = where[order], tasks[order]
        kind, price = self._terms(job, preference, cluster, where, tasks)
        return JobPlan(job, preference, cluster, where, tasks, racks, evicted, kind, price)

    def _terms(self, job: JobRequest, preference: int, cluster: int, rows: I4, tasks: I8) -> tuple[int, int]:
        """The place of the kind of capacity in the job's list, and billionths of a US dollar an hour.

        Of several clusters the last of the places, and the sum of the prices.
        """
        gpu_type = job.gpu_types[preference] if job.gpus_per_task else None
        place, price = 0, 0
        for one in [cluster] if cluster != SEVERAL else self.region.clusters_of(rows):
            capacity, gpu_usd_per_h, core_usd_per_h = self.region.terms(one, gpu_type)
            here = tasks.sum() if cluster != SEVERAL else tasks[self.region.machines_of(one, rows)].sum()
            place = max(place, job.capacity.index(capacity))
            price += int(here) * nano_usd_per_h(
                job.gpus_per_task, gpu_usd_per_h, job.cpus_milli_per_task, core_usd_per_h
            )
        return place, price


class Undo:
    """What was taken and given up in a region, to be put back."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._taken: list[JobPlan] = []
        self._released: list[int] = []

    def take(self, plan: JobPlan) -> None:
        """Takes what a job's tasks need."""
        self._take(plan, 1)
        self._taken.append(plan)

    def release(self, victim: int) -> None:
        """Gives up what a victim holds."""
        self._release(victim, 1)
        self._released.append(victim)

    def withhold(self, victim: int) -> None:
        """A victim keeps what it had given up."""
        self._release(victim, -1)
        self._released.remove(victim)

    def _take(self, plan: JobPlan, sign: int) -> None:
        take(self._region.machines, need_of(plan.job), plan.rows, plan.tasks, sign)

    def _release(self, victim: int, sign: int) -> None:
        free_all(self._region.machines, self._region.holders, victim, sign)

    def __call__(self) -> None:
        """Puts everything back."""
        for plan in self._taken:
            self._take(plan, -1)
        for victim in self._released:
            self._release(victim, -1)
        self._taken.clear()
        self._released.clear()


@contextmanager
def undoing(region: Region) -> Iterator[Undo]:
    """An `Undo` that is called at the end, whatever happens."""
    undo, version = Undo(region), region.machines.version.copy()
    try:
        yield undo
    finally:
        undo()
        region.machines.version[:] = version  # All is as it was.
