"""Awards one batch of the queue: plans it in queue order, commits the plans, and plans again after a failed commit.

Plans are made on the scheduler's in-memory state and committed in Postgres, where the facts may have changed since. So
a batch may take several rounds. A round covers, in queue order, the workloads whose outcome is still open.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace

from sqlalchemy import Engine

from activities.scheduling import awards
from activities.scheduling.bids import BidSubject, closed
from activities.scheduling.scheduler_state import SchedulerState
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid
from gms.auction.candidate import AuctionOutcome, Candidate, Stats
from infra.db import outbox
from infra.db.session import transaction

_TRIES = 3
"""The number of stale plans of a workload after which only the next tick plans it again."""


@dataclass(frozen=True)
class AwardRound:
    """The outcomes of one round, in queue order, and how many of them were committed."""

    outcomes: Sequence[AuctionOutcome]
    committed: awards.Awarded

    @property
    def settled(self) -> int:
        """The number of workloads whose outcome is final after this round (awarded or waiting). Later ones are void."""
        if self.committed.verdict is None:
            return len(self.outcomes)
        placed = [number for number, outcome in enumerate(self.outcomes) if outcome.bid is not None]
        return placed[self.committed.count]


class BatchAward:
    """One batch. The caller must hold the scheduler state (`SchedulerState.current`) until it is awarded."""

    def __init__(
        self,
        engine: Engine,
        state: SchedulerState,
        scan: int,
        batch: Sequence[BidSubject],
        left_out: Mapping[str, Reason],
        bids: Mapping[str, Sequence[Bid]],
    ) -> None:
        """`left_out`: regions that take no part, with the reason; `bids`: by region, the bids made on this batch."""
        self._engine, self._state, self._scan = engine, state, scan
        self._auction = state.auction(scan)
        self._before = replace(self._auction.stats)
        self._reachable = state.regions.keys() - left_out.keys()
        self._closed = closed_to(state, batch, left_out)
        self._answers = with_bids(self._closed, bids)
        self._left = list(batch)
        self._stale: Counter[str] = Counter()
        self.awarded = 0
        self.rebids = 0
        """Bids that were repeated because they were stale."""
        self.waiting: list[BidSubject] = []
        self.outcomes: dict[str, AuctionOutcome] = {}
        """The last outcome of each workload, by id."""
        self.conflicts: dict[str, Reason] = {}
        """By id, the workloads whose plan was stale in each of `_TRIES` rounds, with the reason to show."""

    @property
    def stats(self) -> tuple[Stats, Stats]:
        """The auction's counters before this batch, and now."""
        return self._before, self._auction.stats

    @property
    def gave_up(self) -> bool:
        """Whether a workload's plan was stale in `_TRIES` rounds: the next scan tries it again."""
        return any(count == _TRIES for count in self._stale.values())

    def run(self) -> None:
        """Awards the batch in rounds."""
        while self._left:
            # 1. Place the remaining workloads in queue order, and commit their plans.
            done = self._place()
            # 2. Wake the readers of events, and the scheduler if an award changed ranks.
            self._wake(done)
            # 3. Record which workloads are awarded and which wait.
            self._note(done)
            if done.committed.verdict is None:
                return
            # 4. A plan was not committed: read the changes from Postgres, and discard the plans after it.
            self._read_anew(done)
            # 5. Continue with the same workload, or with the next one.
            self._left = self._after(done)

    def _after(self, done: AwardRound) -> list[BidSubject]:
        """Returns the workloads that the next round plans, after a plan that was not committed."""
        if self._tries_again(done):
            return self._left[done.settled :]
        element = self._left[done.settled].queued.element
        rest = self._left[done.settled + 1 :]
        if element is None or done.committed.verdict is not awards.AwardFailure.GONE:
            return rest
        # The array was cancelled or is on hold, or its throttle admits no more of its elements.
        return [a for a in rest if a.queued.element is None or a.queued.element.array != element.array]

    def _place(self) -> AwardRound:
        """Computes outcomes, and concurrently commits earlier ones."""
        outcomes: list[AuctionOutcome] = []
        bids, rebids = self._auction.stats.bids, self._auction.stats.rebids
        is_first = self._answers is not self._closed
        answers = [self._answers[a.queued.workload] for a in self._left]
        candidate_outcomes = self._auction.iter_outcomes(
            candidates(self._left, self._reachable, self._state.now_s), answers
        )
        with closing(candidate_outcomes), awards.connected(self._engine) as connection:
            committed = awards.award(connection, _planned(self._left, candidate_outcomes, outcomes))
        # The first round repeats only stale bids, later rounds all of them.
        stats = self._auction.stats
        self.rebids += stats.rebids - rebids if is_first else stats.bids - bids
        self._answers = self._closed  # The regions' original bids are stale after the first round.
        self.awarded += committed.count
        return AwardRound(outcomes, committed)

    def _wake(self, done: AwardRound) -> None:
        if not done.committed.count:
            return
        with transaction(self._engine) as session:
            outbox.wake_readers(session)
            settled = list(zip(self._left[: done.settled], done.outcomes, strict=False))
            if any(_lets_others_evict(*each) or _has_followers(*each) for each in settled):
                outbox.wake_scheduler(session)

    def _note(self, done: AwardRound) -> None:
        self.outcomes |= {outcome.workload: outcome for outcome in done.outcomes[: done.settled + 1]}
        settled = zip(self._left[: done.settled], done.outcomes, strict=False)
        self.waiting += [a for a, outcome in settled if outcome.bid is None]

    def _read_anew(self, done: AwardRound) -> None:
        for outcome in done.outcomes[done.settled :]:
            if outcome.plan is not None:
                self._state.mark_stale(outcome.plan)
        self._state.apply_changes()
        self._auction = self._state.auction(self._scan)
        self._auction.forget_refusals()
        for outcome in done.outcomes[done.settled :]:
            self._auction.drop_reservation(outcome.workload)

    def _tries_again(self, done: AwardRound) -> bool:
        """Returns whether the workload whose plan was not committed is planned again in this batch."""
        failed, bid = self._left[done.settled], done.outcomes[done.settled].bid
        workload = failed.queued.workload
        self._stale[workload] += 1
        if done.committed.verdict is not awards.AwardFailure.STALE:
            return False
        if self._stale[workload] < _TRIES:
            return True
        if bid is not None:
            self.conflicts[workload] = Reason(ReasonCode.AWARD_CONFLICT, {"region": bid.region})
            self.waiting.append(failed)
        return False


def _planned(
    left: Sequence[BidSubject], candidate_outcomes: Iterable[AuctionOutcome], outcomes: list[AuctionOutcome]
) -> Iterator[awards.PlannedAward]:
    """Yields the awards to commit, one for each plan. Appends every outcome to `outcomes`."""
    for a, outcome in zip(left, candidate_outcomes, strict=True):
        outcomes.append(outcome)
        if (bid := outcome.bid) is not None and bid.plan is not None:
            queued = a.queued
            yield awards.PlannedAward(bid.plan, queued.rank, a.demand.jobs, bid.victim_attempts, queued.element)


def _lets_others_evict(a: BidSubject, outcome: AuctionOutcome) -> bool:
    """Returns whether the award makes other workloads over-quota without evicting them.

    In that case the next scan must lower their rank, so that other workloads may evict them.
    """
    return outcome.plan is not None and not a.request.displaces.issubset(outcome.plan.victims)


def _has_followers(a: BidSubject, outcome: AuctionOutcome) -> bool:
    """Returns whether an element of an array was awarded: the next scan ranks more of its elements."""
    return outcome.plan is not None and a.queued.element is not None


Answers = dict[str, Bid]
"""The bids of the regions, by region."""


def candidates(batch: Iterable[BidSubject], regions: Set[str], now_s: float) -> list[Candidate]:
    """Returns the auction candidates of a batch, each with those of `regions` that may run it."""
    return [
        Candidate(
            a.request,
            regions=frozenset(region for region in regions if a.may_run_in(region)),
            waited_s=max(0.0, now_s - a.waits_from_s),
            max_runtime_s=a.demand.max_runtime_s,
        )
        for a in batch
    ]


def closed_to(state: SchedulerState, batch: Sequence[BidSubject], left_out: Mapping[str, Reason]) -> dict[str, Answers]:
    """Returns, for each workload, the answers of regions that cannot run it, independent of their free resources.

    These are the regions in which it may not run, and the regions in `left_out`, which take no part in the auction.
    """
    answers: dict[str, Answers] = {}
    for a in batch:
        own = answers[a.queued.workload] = {}
        for region in state.regions:
            if not a.may_run_in(region):
                own[region] = closed(state.planner(region), a)
            elif region in left_out:
                own[region] = Bid(a.queued.workload, region, None, (left_out[region],))
    return answers


def with_bids(answers: Mapping[str, Answers], bids: Mapping[str, Sequence[Bid]]) -> dict[str, Answers]:
    """Returns the answers, extended by the bids that regions made in other processes."""
    out = {workload: dict(own) for workload, own in answers.items()}
    for region, found in bids.items():
        for bid in found:
            if bid.workload in out:
                out[bid.workload].setdefault(region, bid)
    return out
