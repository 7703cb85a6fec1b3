"""Awarding one batch of the queue: placed in queue order, committed, and placed again from where a commit failed.

Plans are made on the columns of the scheduler state, and committed in Postgres, whose facts may have changed since. So
a batch may take several rounds, each of which begins with the first workload that is not settled.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from sqlalchemy import Engine

from activities.scheduling import awards
from activities.scheduling.bids import Asked
from activities.scheduling.candidates import candidates, closed_to, with_bids
from activities.scheduling.scheduler_state import SchedulerState
from auction.candidate import Outcome, Stats
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid
from infra.db import outbox
from infra.db.session import transaction

_TRIES = 3
"""How often a workload's plan may turn out stale before the next tick tries it again."""


@dataclass(frozen=True)
class Round:
    """What came of one round: the outcomes of the workloads that were left, as far as it came."""

    outcomes: Sequence[Outcome]
    committed: awards.Awarded

    @property
    def settled(self) -> int:
        """How many of the workloads that were left are awarded or wait; the outcomes of the others are void."""
        if self.committed.verdict is None:
            return len(self.outcomes)
        placed = [number for number, outcome in enumerate(self.outcomes) if outcome.bid is not None]
        return placed[self.committed.count]


class BatchAward:
    """One batch. The caller holds the scheduler state (`SchedulerState.current`) as long as it uses this."""

    def __init__(
        self,
        engine: Engine,
        state: SchedulerState,
        scan: int,
        batch: Sequence[Asked],
        left_out: Mapping[str, Reason],
        bids: Mapping[str, Sequence[Bid]],
    ) -> None:
        """`left_out`: regions that take no part, with the reason; `bids`: what regions bid on the batch already."""
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
        """Bids that had to be made again."""
        self.waiting: list[Asked] = []
        self.outcomes: dict[str, Outcome] = {}
        """By workload, the last one."""
        self.conflicts: dict[str, Reason] = {}
        """By workload, those whose plans were stale again and again."""

    @property
    def stats(self) -> tuple[Stats, Stats]:
        """What the auction had counted before this batch, and what it has counted now."""
        return self._before, self._auction.stats

    @property
    def gave_up(self) -> bool:
        """Whether a plan was stale so often that only another scan tries it again."""
        return any(count == _TRIES for count in self._stale.values())

    def run(self) -> None:
        """Awards the batch, round by round."""
        while self._left:
            # 1. Place what is left in queue order, and commit what has a plan.
            done = self._place()
            # 2. Wake those who follow awards.
            self._wake(done)
            # 3. Note who is awarded and who waits.
            self._note(done)
            if done.committed.verdict is None:
                return
            # 4. One award did not hold: read what has changed, and void the plans after it.
            self._read_anew(done)
            # 5. Go on with that workload, or with the next.
            self._left = self._left[done.settled if self._tries_again(done) else done.settled + 1 :]

    def _place(self) -> Round:
        """Outcomes are computed while earlier ones are committed."""
        outcomes: list[Outcome] = []
        bids, rebids = self._auction.stats.bids, self._auction.stats.rebids
        is_first = self._answers is not self._closed
        answers = [self._answers[a.queued.workload] for a in self._left]
        placing = self._auction.placing(candidates(self._left, self._reachable, self._state.now_s), answers)
        with closing(placing), awards.connected(self._engine) as connection:
            committed = awards.award(connection, _planned(self._left, placing, outcomes))
        # In the first round only stale bids are made again, in the others all are.
        stats = self._auction.stats
        self.rebids += stats.rebids - rebids if is_first else stats.bids - bids
        self._answers = self._closed  # What was bid before is of another time now.
        self.awarded += committed.count
        return Round(outcomes, committed)

    def _wake(self, done: Round) -> None:
        if not done.committed.count:
            return
        with transaction(self._engine) as session:
            outbox.wake_readers(session)
            if any(map(_lets_others_evict, self._left[: done.settled], done.outcomes)):
                outbox.wake_scheduler(session)

    def _note(self, done: Round) -> None:
        self.outcomes |= {outcome.workload: outcome for outcome in done.outcomes[: done.settled + 1]}
        settled = zip(self._left[: done.settled], done.outcomes, strict=False)
        self.waiting += [a for a, outcome in settled if outcome.bid is None]

    def _read_anew(self, done: Round) -> None:
        for outcome in done.outcomes[done.settled :]:
            if outcome.plan is not None:
                self._state.doubt(outcome.plan)
        self._state.look()
        self._auction = self._state.auction(self._scan)
        self._auction.forget_refusals()

    def _tries_again(self, done: Round) -> bool:
        """Whether the workload whose award did not hold is placed again in this batch; else it may have to wait."""
        failed, bid = self._left[done.settled], done.outcomes[done.settled].bid
        workload = failed.queued.workload
        self._stale[workload] += 1
        if done.committed.verdict is not awards.Verdict.STALE:
            return False
        if self._stale[workload] < _TRIES:
            return True
        if bid is not None:
            self.conflicts[workload] = Reason(ReasonCode.AWARD_CONFLICT, {"region": bid.region})
            self.waiting.append(failed)
        return False


def _planned(
    left: Sequence[Asked], placing: Iterable[Outcome], outcomes: list[Outcome]
) -> Iterator[awards.PlannedAward]:
    """The awards of those that are placed, as they are; every outcome is appended to `outcomes`."""
    for a, outcome in zip(left, placing, strict=True):
        outcomes.append(outcome)
        if outcome.bid is not None and outcome.bid.plan is not None:
            yield awards.PlannedAward(outcome.bid.plan, a.queued.rank, a.demand.jobs, outcome.bid.victim_attempts)


def _lets_others_evict(a: Asked, outcome: Outcome) -> bool:
    """Whether an award has made workloads over-quota that it did not evict: only the next scan gives them that rank."""
    return outcome.plan is not None and not a.request.displaces.issubset(outcome.plan.victims)
