"""A region's bidder in an auction: it makes bids, caches refusals, and withholds reserved resources."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from rms.reserve import (
    Reservation,
    Source,
    available_from_s,
    known_ends_s,
    renew,
    reserve,
    reserve_unknown,
    withheld,
    worse,
)

_Alike = tuple[tuple[JobRequest, ...], frozenset[str], tuple[frozenset[str], ...], frozenset[int]]


@dataclass(frozen=True)
class Reserved:
    """A workload's reservation of one pass, stored for renewal in the next pass. It holds no resources."""

    jobs: tuple[JobRequest, ...]
    """Jobs of the request. A reservation is not renewed for other jobs: they may need other machines."""
    region: str
    machines: Mapping[str, I8]
    """Reserved amounts by machine id, each of shape (3,)."""
    sources: Mapping[str, Source]
    """Workloads whose resources go to the reservation, by id (`rms.reserve`)."""
    at_s: float
    """Time of the last renewal."""


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
        self.reservations: list[Reservation] = []
        """The reservations in this region in the current pass, in queue order."""
        self._hopeless = NegativeCache()
        """Requests of this pass that would be refused even if no holder of worse rank was protected."""
        self._ends_s: F8 | None = None
        """Cached ends of the maximum runtimes; None after an award or a revocation."""
        self._plans: dict[_Alike, Plan] = {}
        """Cached plans without evictions, by jobs, machines that are avoided or left out if possible, and whether
        reserved resources were withheld. They are valid for `_state`."""
        self._state: tuple[object, ...] = ()

    def open(self, now_s: float) -> None:
        """Starts a pass at the time `now_s`: updates the columns, and clears the reservations and all caches."""
        self.region.refresh(now_s)
        self.reservations.clear()
        self._ends_s = None
        self.cache.clear()
        self._hopeless.clear()
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

    def reserve(self, candidate: Candidate, last: Reserved | None, *, patient: bool) -> Reservation | None:
        """Returns the reservation of a refused workload in this region; None if waiting alone does not help it.

        `last` is its reservation in an earlier pass; it is renewed if it was here and if possible. A workload that is
        `patient` has waited long: it also gets the resources of workloads of its own rank and of better ranks, and they
        are withheld from workloads of its own rank, too. A region has one such reservation at a time. Nothing is idle
        for an over-quota workload unless its start is known.
        """
        request, taken, region = self._asking(candidate), self.reservations, self.region
        patient = patient and not self.blocks_own_rank
        if not patient and request.rank == OVER_QUOTA_RANK:
            return None
        # An over-quota workload gets a reservation only after it has waited for twice the rest of its wait.
        latest_s = region.now_s + (candidate.waited_s / 2 if request.rank == OVER_QUOTA_RANK else inf)
        with region.demoted(request.displaces, request.rank), region.without(request.avoids):
            if not (patient or self._is_blocked_by_time(request)) or no_hardware(self._planner, request):
                return None
            available_s = available_from_s(self._planner, request, self._known_ends_s() if patient else None)
            found = None
            if last is not None and last.region == region.name:
                found = renew(self._planner, request, available_s, last.machines, last.sources, taken)
            if found is None or latest_s < found.starts_at_s:
                found = reserve(self._planner, request, available_s, taken, latest_s)
            if patient and request.rank < OVER_QUOTA_RANK and (found is None or found.starts_at_s == inf):
                fresh = reserve_unknown(self._planner, request, available_s, taken)
                if fresh is not None and (found is None or fresh.lacking < found.lacking):
                    found = fresh
        if found is None and not patient and _is_plain(request):
            self._hopeless.add(request, request.jobs[0])
        return None if found is None else replace(found, blocks_own_rank=patient)

    def put_reservation(self, reservation: Reservation) -> None:
        """Withholds the resources of a reservation for the rest of the pass.

        The workloads of worse rank that hold them keep the protection that they have, but get no new one.
        """
        self.reservations.append(reservation)
        for id_, source in reservation.sources.items():
            if self.region.workload(id_).rank > reservation.rank:
                self.region.limit_protection(id_, source.protected_until_s)

    def reserved(self, candidate: Candidate, made: Reservation) -> Reserved:
        """Returns what is stored of a reservation for its renewal."""
        machines = {self.region.ids[row]: need for row, need in made.needs.items()}
        return Reserved(candidate.request.jobs, self.region.name, machines, made.sources, self.region.now_s)

    @property
    def blocks_own_rank(self) -> bool:
        """Whether the region has the reservation of a patient workload in this pass."""
        return any(one.blocks_own_rank for one in self.reservations)

    def _is_blocked_by_time(self, request: PlacementRequest) -> bool:
        """Returns whether holders of worse rank, or evictions under way, may make room for the request later."""
        if _is_plain(request) and self._hopeless.find(request) is not None:
            return False
        return bool(self.region.promises) or bool((worse(self.region, request) & ~self.region.holders.evictable).any())

    def _known_ends_s(self) -> F8:
        if self._ends_s is None:
            self._ends_s = known_ends_s(self.region)
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

    def _binds(self, candidate: Candidate) -> frozenset[int]:
        """Returns the positions of the reservations whose resources are withheld from a workload."""
        if not self.reservations:
            return frozenset()
        rank, ends_by_s = self._asking(candidate).rank, self.region.now_s + candidate.max_runtime_s
        return frozenset(i for i, one in enumerate(self.reservations) if one.blocks(rank, ends_by_s))

    @contextmanager
    def _reach(self, candidate: Candidate) -> Iterator[None]:
        """Withholds the resources that are reserved for others, while the block runs."""
        bound = self._binds(candidate)
        with withheld(self.region, [self.reservations[i] for i in sorted(bound)]):
            yield

    def _like(self, request: PlacementRequest, job: JobRequest, known: Refused) -> tuple[Reason, ...]:
        detail: dict[str, object] = {"region": self.region.name, "job": job.name, "needs": needs(known.job)}
        until_s = self._planner.protected_until_s(request)
        if until_s < inf:
            detail["protected_until"] = in_words(until_s)
        also, _ = waits(request, self.region)
        return no_hardware(self._planner, request) or (Reason(ReasonCode.REFUSED_LIKE, detail), *also)


def _is_plain(request: PlacementRequest) -> bool:
    """Returns whether a refusal of the request says something about other requests of the same demand."""
    return len(request.jobs) == 1 and not (request.avoids or request.displaces or any(request.left_out))
