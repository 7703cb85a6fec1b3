"""The auction: every region bids on a batch of the queue's head, and plans are awarded in its order (MAST 4.2, 4.3)."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf

from auction.candidate import Candidate, Outcome, Stats
from auction.joint import Choice, Head, Plans, is_better, is_hopeful, proposals
from auction.region_bidder import RegionBidder
from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, JobRequest
from rms.arrays import I8
from rms.award import Award, StalePlan
from rms.negative import NegativeCache
from rms.region import Region
from rms.reserve import Reservation

_FORGOTTEN_S = 3600.0
"""A reservation that was not renewed for so long is dropped: its workload no longer waits."""
Bids = dict[str, Bid]
"""By region."""
Won = tuple[Bid, Award]
Result = tuple[Bids, Won | None]
"""A workload's bids, as they were last, and what it was awarded."""


@dataclass(frozen=True)
class Options:
    """How the auction decides."""

    negative_cache: bool = True
    explain: bool = True
    """Whether a refusal that the negative cache answers says why: a simulation asks often, and shows no reasons."""
    may_evict: bool = True
    joint: bool = False
    """Whether bids for the head of the queue are chosen together where one at a time leaves somebody out."""
    joint_head: int = 32
    joint_budget: float = 1.0
    """CP-SAT's deterministic time for one head, about seconds."""
    reserve_after_s: float = inf
    """A workload that has waited longer reserves what it needs as it frees up.

    A region is reserved once in a pass, in queue order: for over-quota workloads only what those within quota leave,
    and only once they have waited for twice as long as they are expected to wait still. What is kept for a gang is idle
    until others end. Where their ends are not known, they are expected to go on for as long as they ran: so nothing is
    kept idle for longer than the gang had waited when the last of them began.
    """


@dataclass(frozen=True)
class Reserved:
    """What a workload reserved in a pass, to go on with it in the next: it holds nothing."""

    jobs: tuple[JobRequest, ...]
    """For what: with other GPU types it may need other machines."""
    region: str
    machines: Mapping[str, I8]
    """What it needs of each, shape (3,)."""
    at_s: float


class Auction:
    """All regions, in one process. Awards show in the regions' columns at once."""

    def __init__(self, regions: Iterable[Region], options: Options = Options(), stats: Stats | None = None) -> None:
        """Counts go on from `stats`."""
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
        self._reserved: dict[str, Reserved] = {}
        """By workload, what it reserved last."""
        self._changed: set[str] = set()
        """Regions that an award has changed since the bids of the batch."""

    @property
    def regions(self) -> Mapping[str, Region]:
        """The regions, by name."""
        return {name: bidder.region for name, bidder in self._bidders.items()}

    def open(self, now_s: float) -> None:
        """Starts a pass over the queue: columns are of this moment, and nothing has been refused or reserved yet."""
        for bidder in self._bidders.values():
            bidder.open(now_s)
        self._reserved = {id_: last for id_, last in self._reserved.items() if last.at_s > now_s - _FORGOTTEN_S}

    def place(
        self, candidates: Sequence[Candidate], answers: Sequence[Mapping[str, Bid]] | None = None
    ) -> list[Outcome]:
        """`placing`, all of it."""
        return list(self.placing(candidates, answers))

    def placing(
        self, candidates: Sequence[Candidate], answers: Sequence[Mapping[str, Bid]] | None = None
    ) -> Generator[Outcome, None, None]:
        """What each of a batch gets, as if they were placed one at a time: `candidates` are in queue order.

        Each outcome comes as soon as it is known. Closed before its end, those that were not told have taken nothing.

        All regions bid on the whole batch first. A bid is stale once its region has changed since, and is asked for
        again in its turn. A refusal that is lasting is never stale: awards only take. (Any other may be: with less room
        a gang's first job may go elsewhere, and leave its place to the next.)

        `answers` are bids on the batch from elsewhere, for each candidate by region, made on columns that may have been
        older or newer than these: what does not hold here is asked for again, and what they lack is asked for.
        """
        self._changed.clear()
        self.stats.rounds += 1
        bids = [
            self._first(candidate, dict(answers[i]) if answers is not None else {})
            for i, candidate in enumerate(candidates)
        ]
        head = min(len(candidates), self._options.joint_head) if self._options.joint else 0
        results = self._together(candidates[:head], bids[:head])
        told = 0
        try:
            for candidate, result in zip(candidates[:head], results, strict=True):
                told += 1
                yield self._settle(candidate, *result)
        finally:
            self._revoke_all(results[told:])
        for candidate, found in zip(candidates[head:], bids[head:], strict=True):
            yield self._settle(candidate, found, self._one(candidate, found))

    def bidder(self, region: str) -> RegionBidder:
        """A region's bidder."""
        return self._bidders[region]

    def revoke(self, given: Award) -> None:
        """Takes an award back that could not be committed."""
        self._bidders[given.plan.region].revoke(given)

    def forget_refusals(self) -> None:
        """What was awarded was not to be, and is free again: so what had no room may have some now."""
        for bidder in self._bidders.values():
            bidder.cache.clear()

    def _first(self, candidate: Candidate, known: Bids) -> Bids:
        """Bids on one workload; `known` ones stay, but for plans of regions that are not there or not allowed."""
        usable = {r: b for r, b in known.items() if b.plan is None or (r in self._bidders and candidate.may_run_in(r))}
        return usable | self._ask(candidate, [name for name in self._regions_of(candidate) if name not in usable])

    def _ask(self, candidate: Candidate, regions: Iterable[str]) -> Bids:
        return {name: self._bidders[name].bid(candidate) for name in regions}

    def _regions_of(self, candidate: Candidate) -> Iterable[str]:
        """Where it may run, by name."""
        return self._bidders if candidate.regions is None else sorted(candidate.regions & self._bidders.keys())

    def _one(self, candidate: Candidate, bids: Bids, only: str | None = None) -> Won | None:
        """Awards the best plan, wherever it is or in one region only. `bids` are renewed where they are stale."""
        stale = [
            name
            for name, bid in bids.items()
            if name in self._changed and not bid.lasting and candidate.may_run_in(name)
        ]
        if only is not None:
            stale = [name for name in stale if name == only]
        fresh: set[str] = set()
        while True:
            if stale:
                self.stats.rounds += 1
                self.stats.rebids += len(stale)
                bids.update(self._ask(candidate, stale))
                fresh.update(stale)
            best = candidate.best(bid for name, bid in bids.items() if only in (None, name))
            if best is None:
                return None
            try:
                given = self._bidders[best.region].award(candidate, best)
            except StalePlan:
                if best.region in fresh:
                    raise
                stale = [best.region]  # It was bid on other facts than these.
                continue
            self._changed.add(best.region)
            return bids[best.region], given

    def _settle(self, candidate: Candidate, bids: Bids, won: Won | None) -> Outcome:
        if won is not None:
            self.stats.awards += 1
            return Outcome(candidate.request.workload, won[0], bids)
        if candidate.waited_s <= self._options.reserve_after_s:
            return Outcome(candidate.request.workload, None, bids)
        return self._reserve(candidate, bids)

    def _reserve(self, candidate: Candidate, bids: Bids) -> Outcome:
        within_s = candidate.waited_s / 2 if candidate.request.rank == OVER_QUOTA_RANK else inf
        made = list(self._offers(candidate, within_s))
        if not made:
            return Outcome(candidate.request.workload, None, bids)
        starts_at_s, name, offer = min(made, key=lambda one: one[:2])
        bidder = self._bidders[name]
        bidder.reservation = offer
        machines = {bidder.region.ids[row]: need for row, need in offer.needs.items()}
        self._reserved[candidate.request.workload] = Reserved(
            candidate.request.jobs, name, machines, bidder.region.now_s
        )
        self._changed.add(name)
        at = datetime.fromtimestamp(starts_at_s, UTC).isoformat(timespec="seconds")
        reason = Reason(ReasonCode.RESERVED, {"region": name, "starts_at": at})
        return Outcome(candidate.request.workload, None, bids, reason, starts_at_s)

    def _offers(self, candidate: Candidate, within_s: float) -> Iterator[tuple[float, str, Reservation]]:
        """Reservations that could be made, with their starts: that of the pass before, else one of each region."""
        last = self._reserved.get(candidate.request.workload)
        if last is not None and last.jobs == candidate.request.jobs and last.region in self._regions_of(candidate):
            again = self._bidders[last.region].again(candidate, last.machines, within_s)
            if again is not None:
                yield again.starts_at_s, last.region, again
                return
        for name in self._regions_of(candidate):
            offer = self._bidders[name].soonest(candidate, within_s)
            if offer is not None:
                yield offer.starts_at_s, name, offer

    # ------------------------------------------------------------------------------------------------- the joint choice

    def _together(self, candidates: Sequence[Candidate], bids: Sequence[Bids]) -> list[Result]:
        """What the head gets: as one at a time, or more of them if another choice of regions makes room."""
        refused = {name: bidder.cache.copy() for name, bidder in self._bidders.items()}
        alone = self._run(candidates, bids, {})
        plans = _plans(alone)
        if not is_hopeful(bids, plans):
            return alone
        self.stats.joint_heads += 1
        self._take_back(alone, refused)
        ranks = {candidate.request.rank for candidate in candidates}
        supply = {rank: {name: bidder.supply(rank) for name, bidder in self._bidders.items()} for rank in ranks}
        head, tried = Head(candidates, bids, supply), [plans]
        for choice in proposals(head, tried, self._options.joint_budget):
            together = self._run(candidates, bids, choice)
            made = _plans(together)
            tried.append(made)
            if is_better(head, made, plans):
                self.stats.joint_gains += len(made) - len(plans)
                self.stats.joint_spared += _evicted(plans) - _evicted(made)
                return together
            self._take_back(together, refused)
        return self._run(candidates, bids, {})

    def _run(self, candidates: Sequence[Candidate], bids: Sequence[Bids], choice: Choice) -> list[Result]:
        """Awards one after another, each in the region that was chosen for it if that still has a plan."""
        out: list[Result] = []
        for i, (candidate, first) in enumerate(zip(candidates, bids, strict=True)):
            found = dict(first)
            won = self._one(candidate, found, choice[i]) if i in choice else None
            out.append((found, won or self._one(candidate, found)))
        return out

    def _revoke_all(self, results: Sequence[Result]) -> None:
        for _, won in reversed(results):
            if won is not None:
                self.revoke(won[1])

    def _take_back(self, results: Sequence[Result], refused: Mapping[str, NegativeCache]) -> None:
        """Revokes all awards; what was refused because of them is forgotten."""
        self._revoke_all(results)
        for name, known in refused.items():
            self._bidders[name].cache.become(known)
        self._changed.clear()


def _evicted(plans: Plans) -> int:
    return sum(len(plan.victims) for plan in plans.values())


def _plans(results: Sequence[Result]) -> Plans:
    return {i: won[1].plan for i, (_, won) in enumerate(results) if won is not None}
