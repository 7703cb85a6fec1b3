"""How a batch of the queue is put to the auction (`auction`): who may run where, and what is known beforehand."""

from collections.abc import Iterable, Mapping, Sequence, Set

from activities.scheduling.bids import Asked, closed
from activities.scheduling.scheduler_state import SchedulerState
from auction.candidate import Candidate
from domain.reasons import Reason
from domain.scheduling import Bid

Answers = dict[str, Bid]
"""By region."""


def candidates(batch: Iterable[Asked], regions: Set[str], now_s: float) -> list[Candidate]:
    """A batch as the auction takes it: each workload may run where the user lets it and its data is, in `regions`."""
    return [
        Candidate(
            a.request,
            regions=frozenset(region for region in regions if a.may_run_in(region)),
            waited_s=max(0.0, now_s - a.submitted_s),
            max_runtime_s=a.demand.max_runtime_s,
        )
        for a in batch
    ]


def closed_to(state: SchedulerState, batch: Sequence[Asked], left_out: Mapping[str, Reason]) -> dict[str, Answers]:
    """By workload, the answers of regions that cannot have it, whatever is free there; `left_out` ones with why."""
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
    """The answers, and what regions bid in processes of their own."""
    out = {workload: dict(own) for workload, own in answers.items()}
    for region, found in bids.items():
        for bid in found:
            if bid.workload in out:
                out[bid.workload].setdefault(region, bid)
    return out
