"""A region's bidder in an auction: it makes bids, caches refusals, and withholds reserved resources."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from domain.priority import LOWEST_RANK, OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode, in_words
from domain.scheduling import Bid, JobRequest, PlacementRequest, Plan
from gms.auction.candidate import Candidate, Stats
from gms.auction.growth import Grower, growth
from rms.arrays import F8
from rms.award import Award, award, check, revoke
from rms.bid import bid_in
from rms.gang import Planner
from rms.negative_cache import NegativeCache, RefusedJob
from rms.own_tenant import sparing
from rms.refusal import needs, no_hardware, waits
from rms.region import RegionColumns
from rms.reserve import (
    Reservation,
    Withheld,
    available_from_s,
    known_ends_s,
    renew,
    reserve,
    reserve_unknown,
    withheld,
    without_withheld,
    worse,
)
from rms.spread import keeping_apart, others

_Alike = tuple[tuple[JobRequest, ...], frozenset[str], tuple[frozenset[str], ...], frozenset[str], object]

STARVED_S = 86_400.0
"""After this wait, a within-quota workload may also reserve resources whose release time is unknown.

It bounds the wait. It is long, because slots idle for unknown times lengthen the waits of all workloads on traces.
"""


def reserve_later_s(reserve_after_s: float) -> tuple[float, float]:
    """Returns the waits in seconds, in ascending order, after which a within-quota workload may reserve more."""
    return reserve_after_s, max(reserve_after_s, STARVED_S)


@dataclass(frozen=True)
class Reserved:
    """A workload's reservation of one pass, stored for renewal in the next pass. It holds no resources."""

    jobs: tuple[JobRequest, ...]
    """Jobs of the request. A reservation is not renewed for other jobs: they may need other machines."""
    region: str
    made: Reservation
    at_s: float
    """Time of the last renewal."""


class RegionBidder:
    """The bidder of one region in one auction."""

    def __init__(
        self, region: RegionColumns, stats: Stats, *, may_evict: bool, uses_cache: bool, explains: bool = True
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
        self.patient_workload: str | None = None
        """The workload whose reservation excludes workloads of its own rank, if there is one."""
        self._hopeless = NegativeCache()
        """Requests of this pass that would be refused even if no holder of worse rank was protected."""
        self._hopeless_gangs: set[tuple[object, ...]] = set()
        """Keys of such requests that have several jobs, avoid machines, or displace workloads."""
        self._ends_s: F8 | None = None
        """Cached ends of the maximum runtimes, valid for `_ends_state`."""
        self._ends_state: tuple[object, ...] = ()
        self._withheld: dict[frozenset[str], Withheld] = {}
        """Cached amounts that reservations withhold, by the reserving workloads. They are valid for `_state`."""
        self._plans: dict[_Alike, Plan] = {}
        """Cached plans without evictions, by jobs, machines that are avoided or left out if possible, whether reserved
        resources were withheld, and where others of the group are. They are valid for `_state`."""
        self._state: tuple[object, ...] = ()

    def open(self, now_s: float) -> None:
        """Starts a pass at the time `now_s`: updates the columns, and clears the reservations and all caches."""
        self.region.refresh(now_s)
        self.reservations.clear()
        self.patient_workload = None
        self.forget()

    def forget(self) -> None:
        """Clears all caches: after awards were reverted, refused requests may fit."""
        self.cache.clear()
        self._hopeless.clear()
        self._hopeless_gangs.clear()
        self._plans.clear()
        self._withheld.clear()
        self._ends_state = ()

    def bid(self, candidate: Candidate) -> Bid:
        """Returns the region's bid for one workload, from a cache if possible."""
        bound = self._binds(candidate)
        request = self._asking(candidate, bound)
        self._stats.bids += 1
        spread = request.spread and (request.spread.order, others(self.region, request.spread))
        plans, alike = self._plans_now(), (request.jobs, request.avoids, request.left_out, bound, spread)
        if alike in plans:
            # A plan without evictions depends only on the jobs, the machines and the workload's group, not on its rank.
            return Bid(request.workload, self.region.name, replace(plans[alike], workload=request.workload))
        if self._uses_cache:
            known = self.cache.find(request, bound=bound)
            self._stats.negative_hits += known is not None
            self._stats.negative_misses += known is None
            if known is not None:
                why = self._like(request, *known) if self._explains else ()
                retry_at_s = min(self._planner.protected_until_s(request), waits(request, self.region)[1])
                if retry_at_s < inf and self._planner.lacking(request.jobs):
                    retry_at_s = inf  # Time alone gives it no hardware.
                return Bid(request.workload, self.region.name, None, why, lasting=True, retry_at_s=retry_at_s)
        answer = self.offer(candidate)
        with self._reach(bound):
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
        bound = self._binds(candidate)
        with self._reach(bound):
            return bid_in(self._planner, self._asking(candidate, bound))

    def award(self, candidate: Candidate, plan: Plan) -> Award:
        """Awards a plan and updates the columns.

        Raises:
            StalePlan: the plan is no longer valid.
            ValueError: the plan is for another workload.
        """
        request, bound = self._request(candidate), self._binds(candidate)
        if bound:
            with self._reach(bound):
                check(self.region, plan, self._sparing(request, bound))
        # The award takes free resources first, also reserved ones, because the award in the database does not consider
        # reservations. The reserved amounts become free again when the victims release their resources.
        return award(self.region, plan, request, self.region.now_s + candidate.max_runtime_s)

    def grow(self, grower: Grower) -> Plan | None:
        """Returns the place of a running elastic workload with more tasks, if it should grow (`gms.auction.growth`).

        It gets nothing that is reserved, and does not grow if a reservation counts on what it holds.
        """
        if any(grower.request.workload in one.sources for one in self.reservations):
            return None
        with self._reach(frozenset(one.workload for one in self.reservations)):
            return growth(self._planner, grower)

    def revoke(self, given: Award) -> None:
        """Reverts an award."""
        revoke(self.region, given)

    def reserve(self, candidate: Candidate, last: Reserved | None, *, patient: bool) -> Reservation | None:
        """Returns the reservation of a refused workload in this region; None if waiting alone does not help it.

        `last` is its reservation in an earlier pass; it is renewed if it was here and if possible. A workload that is
        `patient` has waited long: it also gets the resources of workloads of its own rank and of better ranks, and they
        are withheld from workloads of its own rank, too. A region has one such reservation at a time. No slot is kept
        idle for a start whose time is unknown, except for a workload that has waited for `STARVED_S`. Over-quota
        workloads do not reserve: runtime limits are far above actual runtimes, so their reservations would lengthen the
        waits of all workloads.
        """
        request, region = self._asking(candidate), self.region
        patient = patient and self.patient_workload in (None, request.workload)
        if request.rank >= OVER_QUOTA_RANK:
            return None
        may_idle = patient and candidate.waited_s > STARVED_S
        before = None if last is None or last.region != region.name else last.made
        with region.demoted(request.displaces, request.rank), region.without(request.avoids):
            if not (patient or self._is_blocked_by_time(request)) or no_hardware(self._planner, request):
                return None
            taken = [one for one in self.reservations if one.workload != request.workload]
            available_s = available_from_s(self._planner, request, self._known_ends_s() if patient else None)
            found = None
            if before is not None:
                until_s = before.backfill_until_s
                found = renew(self._planner, request, available_s, before.needs, before.sources, taken, until_s)
            is_open = found is not None and found.starts_at_s == inf
            if found is None or (is_open and not may_idle):
                found = reserve(self._planner, request, available_s, taken)
            if may_idle and found is None:
                # Later passes renew it on the same machines: after a move, the bound of the wait would not hold.
                found = reserve_unknown(self._planner, request, available_s, taken)
        if found is None:
            if not patient:
                self._note_hopeless(request)
            return None
        # A renewed reservation keeps its earlier limit: otherwise each backfilled workload could postpone the start
        # again.
        until_s = found.starts_at_s if before is None or not before.blocks_own_rank else before.backfill_until_s
        until_s = min(until_s, found.starts_at_s) if patient else -inf
        return replace(found, blocks_own_rank=patient, backfill_until_s=until_s)

    def put_reservation(self, reservation: Reservation) -> None:
        """Withholds the resources of a reservation for the rest of the pass; it replaces the workload's earlier one.

        Workloads of worse rank that hold these resources keep their present protection from eviction, but get no new
        one.
        """
        self.drop_reservation(reservation.workload)
        self.reservations.append(reservation)
        if reservation.blocks_own_rank:
            self.patient_workload = reservation.workload
        self.limit_protections(reservation)

    def drop_reservation(self, workload: str) -> None:
        """Removes the reservation of a workload, if there is one in this pass."""
        if any(one.workload == workload for one in self.reservations):
            self.reservations[:] = [one for one in self.reservations if one.workload != workload]
            self.patient_workload = None if self.patient_workload == workload else self.patient_workload
            self.forget()

    def limit_protections(self, reservation: Reservation) -> None:
        """Keeps holders of worse rank that the reservation counts on from staying protected longer than it assumed."""
        region = self.region
        for id_, source in reservation.sources.items():
            if region.number(id_) is not None:
                holder = region.workload(id_)
                if holder.attempt == source.attempt and holder.rank > reservation.rank:
                    region.limit_protection(id_, source.protected_until_s)

    def _is_blocked_by_time(self, request: PlacementRequest) -> bool:
        """Returns whether a request may fit once holders of worse rank lose protection or evictions complete."""
        if self._hopeless.find(request) if _is_plain(request) else _key(request) in self._hopeless_gangs:
            return False
        return bool(self.region.promises) or bool((worse(self.region, request) & ~self.region.holders.evictable).any())

    def _note_hopeless(self, request: PlacementRequest) -> None:
        if _is_plain(request):
            self._hopeless.add(request, request.jobs[0])
        else:
            self._hopeless_gangs.add(_key(request))

    def _known_ends_s(self) -> F8:
        if self._ends_s is None or self._ends_state != self.region.state:
            self._ends_s, self._ends_state = known_ends_s(self.region), self.region.state
        return self._ends_s

    def _plans_now(self) -> "dict[_Alike, Plan]":
        """Returns the cached plans, after clearing them if the region has changed."""
        if self._state != self.region.state:
            self._plans.clear()
            self._withheld.clear()
            self._state = self.region.state
        return self._plans

    def _request(self, candidate: Candidate) -> PlacementRequest:
        request = sparing(self.region, keeping_apart(self.region, candidate.request))
        return request if self._may_evict else replace(request, rank=LOWEST_RANK)

    def _asking(self, candidate: Candidate, bound: frozenset[str] = frozenset()) -> PlacementRequest:
        """Returns the request with which a plan is computed."""
        return self._sparing(self._request(candidate), bound)

    def _sparing(self, request: PlacementRequest, bound: frozenset[str]) -> PlacementRequest:
        """Returns the request without the right to evict workloads whose resources others have reserved."""
        if not bound:
            return request
        sources = (one.sources for one in self.reservations if one.workload in bound)
        return replace(request, may_not_evict=request.may_not_evict.union(*sources))

    def _binds(self, candidate: Candidate) -> frozenset[str]:
        """Returns the workloads whose reserved resources are withheld from a workload."""
        if not self.reservations:
            return frozenset()
        request, ends_by_s = self._asking(candidate), self.region.now_s + candidate.max_runtime_s
        return frozenset(
            one.workload
            for one in self.reservations
            if one.workload != request.workload and one.blocks(request.rank, ends_by_s)
        )

    @contextmanager
    def _reach(self, bound: frozenset[str]) -> Iterator[None]:
        """Withholds the resources that are reserved for the workloads in `bound`, while the block runs."""
        if not bound:
            yield
            return
        self._plans_now()
        if bound not in self._withheld:
            self._withheld[bound] = withheld(self.region, [one for one in self.reservations if one.workload in bound])
        with without_withheld(self.region, self._withheld[bound]):
            yield

    def _like(self, request: PlacementRequest, job: JobRequest, known: RefusedJob) -> tuple[Reason, ...]:
        detail: dict[str, object] = {"region": self.region.name, "job": job.name, "needs": needs(known.job)}
        until_s = self._planner.protected_until_s(request)
        if until_s < inf:
            detail["protected_until"] = in_words(until_s)
        also, _ = waits(request, self.region)
        return no_hardware(self._planner, request) or (Reason(ReasonCode.REFUSED_LIKE, detail), *also)


def _is_plain(request: PlacementRequest) -> bool:
    """Returns whether a request can be compared with others by the demand of its only job."""
    return len(request.jobs) == 1 and not (request.avoids or request.displaces)


def _key(request: PlacementRequest) -> tuple[object, ...]:
    return request.jobs, request.rank, request.may_not_evict, request.avoids, request.displaces
