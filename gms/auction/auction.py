"""The auction (MAST 4.2, 4.3): every region bids on a batch of queued workloads; plans are awarded in queue order."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf, nextafter

from domain.priority import LOWEST_RANK, OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid
from gms.auction.candidate import AuctionOutcome, Candidate, Stats
from gms.auction.region_bidder import RegionBidder, Reserved, reserve_later_s
from rms.award import Award, StalePlan
from rms.region import RegionColumns
from rms.reserve import Reservation

_FORGOTTEN_S = 3600.0
"""A reservation that has not been renewed for this time is dropped, because its workload is no longer waiting."""
Bids = dict[str, Bid]
"""Bids by region name."""
Won = tuple[Bid, Award]
"""The winning bid and its award."""


@dataclass(frozen=True)
class Options:
    """Options of the auction."""

    negative_cache: bool = True
    explain: bool = True
    """Whether refusals from the negative cache have reasons. Simulations disable this: they make many bids and show no
    reasons.
    """
    may_evict: bool = True
    """Whether plans may evict running workloads."""
    reserve_after_s: float = inf
    """A workload that has waited longer than this may reserve resources against workloads of its own rank.

    Against workloads of worse rank, a workload reserves immediately if it only has to wait (`rms.reserve`). Infinity:
    no reservations at all.
    """


class Auction:
    """The auction over all regions, in one process. Awards update the regions' columns immediately."""

    def __init__(
        self,
        regions: Iterable[RegionColumns],
        options: Options = Options(),
        stats: Stats | None = None,
        before: "Auction | None" = None,
    ) -> None:
        """`stats`: counters to continue; None starts from 0. `before`: an auction whose reservations are continued."""
        self._options = options
        self.stats = stats if stats is not None else Stats()
        self._bidders = {
            region.name: RegionBidder(
                region,
                self.stats,
                may_evict=options.may_evict,
                uses_cache=options.negative_cache,
                explains=options.explain,
            )
            for region in sorted(regions, key=lambda region: region.name)
        }
        self._reserved: dict[str, Reserved] = {} if before is None else dict(before._reserved)
        """The latest reservation of each workload, by workload id."""
        self._changed: set[str] = set()
        """Regions that an award or reservation has changed since the bids on the batch."""

    @property
    def regions(self) -> Mapping[str, RegionColumns]:
        """The regions by name."""
        return {name: bidder.region for name, bidder in self._bidders.items()}

    def open(self, now_s: float) -> None:
        """Starts a pass: updates the columns to `now_s`, and clears the refusals and reservations of the last pass."""
        for last in self._reserved.values():
            if last.region in self._bidders:
                # A holder that was read again has its full protection: apply the limit of the reservation again.
                self._bidders[last.region].limit_protections(last.made)
        for bidder in self._bidders.values():
            bidder.open(now_s)
        self._reserved = {id_: last for id_, last in self._reserved.items() if last.at_s > now_s - _FORGOTTEN_S}

    def place(
        self, candidates: Sequence[Candidate], answers: Sequence[Mapping[str, Bid]] | None = None
    ) -> list[AuctionOutcome]:
        """Runs `iter_outcomes` to its end and returns all outcomes."""
        return list(self.iter_outcomes(candidates, answers))

    def iter_outcomes(
        self, candidates: Sequence[Candidate], answers: Sequence[Mapping[str, Bid]] | None = None
    ) -> Generator[AuctionOutcome, None, None]:
        """Places a batch of candidates and yields their outcomes, with the same result as placing them one at a time.

        `candidates` are in queue order. Each outcome is yielded as soon as it is known. If the generator is closed
        early, candidates whose outcome was not yielded hold no resources.

        First, all regions bid on the whole batch. A bid is stale if its region has changed since; the region then bids
        again when it is the candidate's turn. A lasting refusal is never stale, because awards only consume resources.
        (Other refusals can become stale: with less free room, the first job of a gang may be placed elsewhere and leave
        its place to the next job.)

        `answers` are bids that another process made on the batch, by region for each candidate. They may be based on
        older or newer columns. A bid that is not valid on the columns here, or that is missing, is requested again.
        """
        self._changed.clear()
        self.stats.rounds += 1
        bids = [
            self._first(candidate, dict(answers[i]) if answers is not None else {})
            for i, candidate in enumerate(candidates)
        ]
        for candidate, found in zip(candidates, bids, strict=True):
            yield self._outcome_of(candidate, found, self._one(candidate, found))

    def bidder(self, region: str) -> RegionBidder:
        """Returns the bidder of a region."""
        return self._bidders[region]

    def reserved_machines(self) -> frozenset[str]:
        """Returns the machines on which reservations of this pass withhold resources from the worst rank."""
        made = (one for bidder in self._bidders.values() for one in bidder.reservations)
        return frozenset(machine for one in made if one.blocks(LOWEST_RANK, inf) for machine in one.needs)

    def revoke(self, given: Award) -> None:
        """Reverts an award that could not be committed to the database."""
        self._bidders[given.plan.region].revoke(given)

    def forget_refusals(self) -> None:
        """Clears all caches of refusals. Call it after awards were reverted: refused jobs may fit now."""
        for bidder in self._bidders.values():
            bidder.forget()

    def drop_reservation(self, workload: str) -> None:
        """Removes a workload's reservation for the rest of this pass. Call it for outcomes that were not committed."""
        for bidder in self._bidders.values():
            bidder.drop_reservation(workload)

    def _first(self, candidate: Candidate, known: Bids) -> Bids:
        """Returns the bids on one workload: the usable bids in `known`, and new bids of all other allowed regions.

        A plan in `known` is not usable if its region does not exist here or is not allowed for the workload.
        """
        usable = {r: b for r, b in known.items() if b.plan is None or (r in self._bidders and candidate.may_run_in(r))}
        # Other processes do not know that a reservation limits the protection of the workloads that hold its resources.
        last = self._reserved.get(candidate.request.workload)
        if last is not None and last.region in self._regions_of(candidate):
            usable = {r: b for r, b in usable.items() if b.plan is not None or r != last.region}
        return usable | self._ask(candidate, [name for name in self._regions_of(candidate) if name not in usable])

    def _ask(self, candidate: Candidate, regions: Iterable[str]) -> Bids:
        return {name: self._bidders[name].bid(candidate) for name in regions}

    def _regions_of(self, candidate: Candidate) -> Iterable[str]:
        """Returns the names of the regions where a candidate may run, sorted."""
        return self._bidders if candidate.regions is None else sorted(candidate.regions & self._bidders.keys())

    def _one(self, candidate: Candidate, bids: Bids) -> Won | None:
        """Awards the best plan of all regions. Stale entries of `bids` are renewed."""
        stale = [
            name
            for name, bid in bids.items()
            if name in self._changed and not bid.lasting and candidate.may_run_in(name)
        ]
        fresh: set[str] = set()
        while True:
            if stale:
                self.stats.rounds += 1
                self.stats.rebids += len(stale)
                bids.update(self._ask(candidate, stale))
                fresh.update(stale)
            best = candidate.best(bids.values())
            if best is None:
                return None
            try:
                given = self._bidders[best.region].award(candidate, best)
            except StalePlan:
                if best.region in fresh:
                    raise
                stale = [best.region]  # The bid was based on a different state of the region.
                continue
            self._changed.add(best.region)
            return bids[best.region], given

    def _outcome_of(self, candidate: Candidate, bids: Bids, won: Won | None) -> AuctionOutcome:
        workload = candidate.request.workload
        if won is not None:
            self.stats.awards += 1
            return AuctionOutcome(workload, won[0], bids)
        if candidate.request.rank >= OVER_QUOTA_RANK or self._options.reserve_after_s == inf:
            return AuctionOutcome(workload, None, bids)
        patient = candidate.waited_s > self._options.reserve_after_s
        outcome = self._reserve(candidate, bids, patient)
        if patient and outcome.reserved is not None:
            return outcome
        return replace(outcome, reserves_at_s=self._reserves_at_s(candidate, bids))

    def _reserves_at_s(self, candidate: Candidate, bids: Bids) -> float:
        """Returns when a candidate will have waited longer than the next of `reserve_later_s`.

        Infinity: it has waited longer than all of them, or every region has a reservation of a patient workload or
        could not hold the candidate even if it were empty.
        """
        later_s = (wait_s for wait_s in reserve_later_s(self._options.reserve_after_s) if wait_s >= candidate.waited_s)
        after_s = next(later_s, inf)
        for name in self._regions_of(candidate):
            bidder, codes = self._bidders[name], {reason.code for reason in bids[name].reasons}
            if bidder.patient_workload is None and codes != {ReasonCode.NO_HARDWARE}:
                return nextafter(bidder.region.now_s + after_s - candidate.waited_s, inf)
        return inf

    def _reserve(self, candidate: Candidate, bids: Bids, patient: bool) -> AuctionOutcome:
        workload = candidate.request.workload
        last = self._reserved.get(workload)
        if last is not None and (last.jobs != candidate.request.jobs or last.region not in self._regions_of(candidate)):
            last = None
        made = self._made(candidate, last, patient)
        if made is None:
            return AuctionOutcome(workload, None, bids)
        name, reservation = made
        bidder = self._bidders[name]
        bidder.put_reservation(reservation)
        self._reserved[workload] = Reserved(candidate.request.jobs, name, reservation, bidder.region.now_s)
        self._changed.add(name)
        if not bidder.region.now_s < reservation.starts_at_s < inf:
            return AuctionOutcome(workload, None, bids, Reason(ReasonCode.RESERVED_OPEN, {"region": name}))
        at = datetime.fromtimestamp(reservation.starts_at_s, UTC).isoformat(timespec="seconds")
        reason = Reason(ReasonCode.RESERVED, {"region": name, "starts_at": at})
        return AuctionOutcome(workload, None, bids, reason, reservation.starts_at_s)

    def _made(self, candidate: Candidate, last: Reserved | None, patient: bool) -> tuple[str, Reservation] | None:
        """Returns the reservation with its region: the renewed one if possible, else that with the earliest start."""
        if last is not None:
            again = self._bidders[last.region].reserve(candidate, last, patient=patient)
            if again is not None:
                return last.region, again
        offers = [
            (name, self._bidders[name].reserve(candidate, last, patient=patient))
            for name in self._regions_of(candidate)
            if last is None or name != last.region
        ]
        made = [(name, offer) for name, offer in offers if offer is not None]
        return min(made, key=lambda one: (one[1].starts_at_s, one[1].lacking, one[0]), default=None)
