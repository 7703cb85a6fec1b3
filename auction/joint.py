"""The joint choice for the queue's head (MAST 4.1): who gets which region, decided for several workloads together.

One at a time, the first may take the only region that the second could have used, or that the second could have used
without evicting anybody. CP-SAT looks for regions for all of them within what regions have in all; whether machines,
racks and victims work out is for the auction to try.

What it may not cost: whoever is placed one at a time is placed, on a GPU type that it likes as well and in one cluster
if it was in one. No more are evicted in all, at no rank or above it, and no more work is lost. So what it wins is room
that would have stayed empty, or evictions that are not needed. Without that it would place more at the expense of those
who run, and they would be back in the queue: measured over days that is a loss.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from auction.candidate import Candidate
from domain.criteria import About, names
from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import Bid, Plan

CPUS = ""
"""The resource that is not a GPU type."""
_PROPOSALS = 6
_VICTIMS = OVER_QUOTA_RANK - 1
"""Where in a cost (`_cost`) the number of all victims is."""
_LOSSES = tuple(name for name in names(About.VICTIMS, adding=True) if name != "victims_by_rank")
Choice = dict[int, str]
"""Place in the head to region."""
At = tuple[int, str]
"""Place in the head, and region."""
Plans = Mapping[int, Plan]
"""Place in the head to the plan that it was awarded."""
Supply = Mapping[str, Mapping[str, int]]
"""By region and resource (a GPU type, or `CPUS` in thousandths): what is free or may be evicted for."""


@dataclass(frozen=True)
class Head:
    """The queue's head, with what each region offers for each of its workloads as if it were alone."""

    candidates: Sequence[Candidate]
    bids: Sequence[Mapping[str, Bid]]
    supply: Mapping[int, Supply]
    """By rank: what a workload of that rank may use."""


def is_hopeful(bids: Sequence[Mapping[str, Bid]], alone: Plans) -> bool:
    """Whether a joint choice could win anything: somebody with an offer is left out, or evicts more than it offered."""
    offers = [[bid.plan for bid in found.values() if bid.plan is not None] for found in bids]
    if any(i not in alone and found for i, found in enumerate(offers)):
        return True
    return any(_victims(plan) > min(map(_victims, offers[i]), default=0) for i, plan in alone.items())


def proposals(head: Head, tried: Sequence[Plans], budget: float) -> Iterator[Choice]:
    """Choices of regions that may be better (`is_better`) than what was placed one at a time, most promising first.

    More at a higher priority counts before any number at a lower one, then fewer victims, and then plans that are
    better for their workloads. A few are tried; each has to differ from those before it. `tried` has what came of each
    so far, first of all of one at a time: who took the machines of somebody's bid there will not be in one region with
    it again. `budget` is CP-SAT's deterministic time for all of them, about seconds.
    """
    from ortools.sat.python import cp_model  # Heavy, and seldom needed.

    alone = tried[0]
    model = cp_model.CpModel()
    plans = {
        (i, region): bid.plan
        for i, bids in enumerate(head.bids)
        for region, bid in sorted(bids.items())
        if bid.plan is not None and (i not in alone or _as_good(bid.plan, alone[i]))
    }
    x = {(i, region): model.new_bool_var(f"{i}@{region}") for i, region in plans}
    own = {i: [v for (j, _), v in x.items() if j == i] for i in range(len(head.candidates))}
    for i, options in own.items():
        if i in alone:
            model.add_exactly_one(options)
        else:
            model.add_at_most_one(options)
    ranks = sorted({candidate.request.rank for candidate in head.candidates})
    needs = {(i, region): _need(head, i, region) for i, region in x}
    for rank in ranks:
        for region, supply in head.supply[rank].items():
            below = [(i, r) for i, r in x if r == region and head.candidates[i].request.rank >= rank]
            for resource, amount in supply.items():
                model.add(sum(needs[at].get(resource, 0) * x[at] for at in below) <= amount)
    most, costs = _cost(alone.values()), {at: _cost([plan]) for at, plan in plans.items()}
    for k, amount in enumerate(most):
        model.add(sum(costs[at][k] * v for at, v in x.items()) <= amount)
    scale = len(head.candidates) * (1 + max((len(options) for options in own.values()), default=0))
    worth = {(i, region): -scale * _victims(plan) - _place(head, i, region) for (i, region), plan in plans.items()}
    weight = scale * (1 + most[_VICTIMS])  # More than all victims that there may be.
    for rank in reversed(ranks):
        numbers = {i for i, candidate in enumerate(head.candidates) if candidate.request.rank == rank}
        for at in x:
            worth[at] += weight if at[0] in numbers else 0
        weight *= 1 + len(numbers)
    model.maximize(sum(worth[at] * v for at, v in x.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is for whoever asked for this.
    solver.parameters.max_deterministic_time = budget / _PROPOSALS
    before = _by_rank(head, alone)
    for _ in range(_PROPOSALS):
        for clash in _clashes(plans, tried[-1]):
            model.add(sum(x[at] for at in clash) <= len(clash) - 1)
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return
        chosen = [at for at, v in x.items() if solver.boolean_value(v)]
        after = _by_rank(head, {i for i, _ in chosen})
        if after < before or (after == before and sum(_victims(plans[at]) for at in chosen) >= most[_VICTIMS]):
            return
        yield dict(chosen)
        model.add(sum(x[at] for at in chosen) <= len(chosen) - 1)


def _clashes(offers: Mapping[At, Plan], made: Plans) -> Iterator[list[At]]:
    """Each offer that came to nothing, or evicts more than it said, with those before it who took its machines."""
    rows = {i: _machines(plan) for i, plan in made.items()}
    for (i, region), offer in offers.items():
        if i in made and _victims(made[i]) <= _victims(offer):
            continue
        wanted = _machines(offer)
        takers = [(j, region) for j in made if j < i and made[j].region == region and not wanted.isdisjoint(rows[j])]
        if takers and all(taker in offers for taker in takers):
            yield [(i, region), *takers]


def _machines(plan: Plan) -> frozenset[str]:
    return frozenset(machine for job in plan.jobs for machine, _ in job.machines)


def _by_rank(head: Head, placed: Iterable[int]) -> tuple[int, ...]:
    ranks = [head.candidates[i].request.rank for i in placed]
    return tuple(ranks.count(rank) for rank in range(1, OVER_QUOTA_RANK + 1))


def is_better(head: Head, plans: Plans, than: Plans) -> bool:
    """Whether more are placed, by priority, or the same at less cost; and nobody pays for it.

    That is neither those of `than` nor those who run.
    """
    costs, most = _cost(plans.values()), _cost(than.values())
    if any(cost > limit for cost, limit in zip(costs, most, strict=True)):
        return False
    if any(i not in plans or not _as_good(plans[i], plan) for i, plan in than.items()):
        return False
    return (_by_rank(head, plans), most[_VICTIMS]) > (_by_rank(head, than), costs[_VICTIMS])


def _as_good(plan: Plan, than: Plan) -> bool:
    """Whether a workload would not mind: racks and machines may be more, and whom it evicts is judged for all."""
    return all(getattr(plan.quality, name) <= getattr(than.quality, name) for name in names(About.PLACE))


def _victims(plan: Plan) -> int:
    return plan.quality.victims


def _cost(plans: Iterable[Plan]) -> list[int]:
    """What may not grow: the victims at each rank or above it, and all else about them that adds up, in thousandths."""
    made = [plan.quality for plan in plans]
    victims = (sum(quality.victims_by_rank[k] for quality in made) for k in range(OVER_QUOTA_RANK))
    others = (sum(1000 * getattr(quality, name) for quality in made) for name in _LOSSES)
    return [*accumulate(victims), *map(round, others)]


def _place(head: Head, i: int, region: str) -> int:
    """How many of its plans a workload would like better."""
    plans = {r: bid.plan for r, bid in head.bids[i].items() if bid.plan is not None}
    keys = {r: head.candidates[i].preference(plan) for r, plan in plans.items()}
    return sum(key < keys[region] for key in keys.values())


def _need(head: Head, i: int, region: str) -> dict[str, int]:
    plan = head.bids[i][region].plan
    assert plan is not None, "only plans have a variable"
    out = {CPUS: sum(job.cpus_milli for job in head.candidates[i].request.jobs)}
    for job, placement in zip(head.candidates[i].request.jobs, plan.jobs, strict=True):
        if placement.gpu_type is not None:
            out[placement.gpu_type] = out.get(placement.gpu_type, 0) + job.gpus
    return out
