"""A region's bidder in an auction: it makes bids, caches refusals, and withholds reserved resources."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import inf

import numpy as np

from auction.candidate import Candidate, Stats
from auction.joint import CPUS
from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode, in_words
from domain.scheduling import Bid, JobRequest, PlacementRequest, Plan
from rms.arrays import F8, I8
from rms.award import Award, award, check, revoke
from rms.bid import bid_in
from rms.gang import Planner
from rms.machines import CPUS_MILLI, GPUS
from rms.negative import NegativeCache, Refused
from rms.refusal import needs, no_hardware, waits
from rms.region import Region
from rms.reserve import Reservation, expected_ends_s, kept, reserve, reserve_again

_Alike = tuple[tuple[JobRequest, ...], frozenset[str], tuple[frozenset[str], ...], bool]


class RegionBidder:
    """The bidder of one region in one auction."""

    def __init__(
        self, region: Region, stats: Stats, *, may_evict: bool, uses_cache: bool, explains: bool = True
    ) -> None:
        self.region = region
        self._stats = stats
        self._planner = Planner(region)
        self._may_evict = may_evict
        self._uses_cache = uses_cache
        self._explains = explains
        self.cache = NegativeCache()
        """Refusals of this pass; always empty if the cache is disabled."""
        self.reservation: Reservation | None = None
        """The reservation in this region in the current pass, if any."""
        self._ends_s: F8 | None = None
        """Cached expected ends of the holders; None after an award or a revocation."""
        self._plans: dict[_Alike, Plan] = {}
        """Cached plans without evictions, by jobs, machines that are avoided or left out if possible, and whether
        reserved resources were withheld. They are valid for `_state`."""
        self._state: tuple[object, ...] = ()

    def open(self, now_s: float) -> None:
        """Starts a pass at the time `now_s`: updates the columns, and clears the reservation and all caches."""
        self.region.refresh(now_s)
        self.reservation, self._ends_s = None, None
        self.cache.clear()
        self._plans.clear()

    def bid(self, candidate: Candidate) -> Bid:
        """Returns the region's bid for one workload, from a cache if possible."""
        request, bound = self._asking(candidate), self._binds(candidate)
        self._stats.bids += 1
        plans, alike = self._plans_now(), (request.jobs, request.avoids, request.left_out, bound)
        if alike in plans:
            # A plan without evictions depends only on the jobs and the machines, not on the workload or its rank.
            return Bid(request.workload, self.region.name, replace(plans[alike], workload=request.workload))
        if self._uses_cache:
            known = self.cache.find(request, bound=bound)
            self._stats.negative_hits += known is not None
            self._stats.negative_misses += known is None
            if known is not None:
                why = self._like(request, *known) if self._explains else ()
                retry_at_s = min(self._planner.protected_until_s(request), waits(request, self.region)[1])
                return Bid(request.workload, self.region.name, None, why, lasting=True, retry_at_s=retry_at_s)
        answer = self.offer(candidate)
        with self._reach(candidate):
            # From a refusal that may be due to avoided machines, nothing follows for other workloads.
            refused = answer.plan is None and not request.avoids
            job = self._planner.without_room(request) if refused else None
        if job is not None:
            answer = replace(answer, lasting=True)
            if self._uses_cache:
                self.cache.add(request, job, bound=bound)
        if answer.plan is not None and not answer.plan.victims:
            plans[alike] = answer.plan
        elif answer.plan is not None:
            answer = replace(answer, victim_attempts=self.region.attempts(answer.plan.victims))
        return answer

    def offer(self, candidate: Candidate) -> Bid:
        """Computes a new bid for the current state without caches. Reserved resources are withheld."""
        with self._reach(candidate):
            return bid_in(self._planner, self._asking(candidate))

    def award(self, candidate: Candidate, plan: Plan) -> Award:
        """Awards a plan and updates the columns.

        Raises:
            StalePlan: the plan is no longer valid.
            ValueError: the plan is for another workload.
        """
        self._ends_s = None
        request = self._request(candidate)
        if self._binds(candidate):
            with self._reach(candidate):
                check(self.region, plan, request)
        # The award takes free resources first, also reserved ones, because the award in the database does not consider
        # reservations. The reserved amounts become free again when the victims release their resources.
        return award(self.region, plan, request, self.region.now_s + candidate.max_runtime_s)

    def revoke(self, given: Award) -> None:
        """Reverts an award."""
        self._ends_s = None
        revoke(self.region, given)

    def supply(self, rank: int) -> dict[str, int]:
        """Returns the total of free resources and holdings of less important ranks, by GPU type and for `CPUS`."""
        region = self.region
        reach = np.maximum(region.machines.kind_free, 0) + region.holders.kind_held[rank + 1 :].sum(axis=0)
        out = {CPUS: int(reach[CPUS_MILLI].sum())}
        for gpu_type, number in region.types.items():
            out[gpu_type] = int(reach[GPUS, region.machines.kind_type == number].sum())
        return out

    def soonest(self, candidate: Candidate, within_s: float) -> Reservation | None:
        """Returns the reservation with the earliest start; None if the start would be later than `within_s` from now.

        Also None if the region already has a reservation, or if the workload would not fit even into an empty region.
        """
        request = self._request(candidate)
        if self.reservation is not None or no_hardware(self._planner, request):
            return None
        with self.region.without(request.avoids):
            return reserve(self._planner, request, self._expected_ends_s(), self.region.now_s + within_s)

    def again(self, candidate: Candidate, needs: Mapping[str, I8], within_s: float) -> Reservation | None:
        """Renews a reservation of an earlier pass, given as amounts by machine id; None if that is not possible.

        See `reserve_again`. Also None if the region already has a reservation.
        """
        if self.reservation is not None:
            return None
        latest_s = self.region.now_s + within_s
        request = self._request(candidate)
        with self.region.without(request.avoids):
            return reserve_again(self._planner, request, self._expected_ends_s(), needs, latest_s)

    def _expected_ends_s(self) -> F8:
        if self._ends_s is None:
            self._ends_s = expected_ends_s(self.region)
        return self._ends_s

    def _plans_now(self) -> "dict[_Alike, Plan]":
        """Returns the cached plans, after clearing them if the region has changed."""
        if self._state != self.region.state:
            self._plans.clear()
            self._state = self.region.state
        return self._plans

    def _request(self, candidate: Candidate) -> PlacementRequest:
        return candidate.request if self._may_evict else replace(candidate.request, rank=OVER_QUOTA_RANK)

    def _asking(self, candidate: Candidate) -> PlacementRequest:
        """Returns the request with which a plan is computed. A request that may not evict gets the lowest rank."""
        request = self._request(candidate)
        return request if request.evicts else replace(request, rank=OVER_QUOTA_RANK)

    def _binds(self, candidate: Candidate) -> bool:
        """Returns whether reserved resources are withheld from a workload: it may still run at the reserved start."""
        reservation = self.reservation
        return reservation is not None and self.region.now_s + candidate.max_runtime_s > reservation.starts_at_s

    def _reach(self, candidate: Candidate) -> AbstractContextManager[None]:
        if self.reservation is not None and self._binds(candidate):
            return kept(self.region, self.reservation)
        return nullcontext()

    def _like(self, request: PlacementRequest, job: JobRequest, known: Refused) -> tuple[Reason, ...]:
        detail: dict[str, object] = {"region": self.region.name, "job": job.name, "needs": needs(known.job)}
        until_s = self._planner.protected_until_s(request)
        if until_s < inf:
            detail["protected_until"] = in_words(until_s)
        also, _ = waits(request, self.region)
        return no_hardware(self._planner, request) or (Reason(ReasonCode.REFUSED_LIKE, detail), *also)
