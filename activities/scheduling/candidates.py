"""Converts a batch of the queue for the auction (`auction`): the allowed regions, and the answers known in advance."""

from collections.abc import Iterable, Mapping, Sequence, Set

from activities.scheduling.bids import BidSubject, closed
from activities.scheduling.scheduler_state import SchedulerState
from domain.reasons import Reason
from domain.scheduling import Bid
from gms.auction.candidate import Candidate

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
