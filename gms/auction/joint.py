"""The joint choice for the head of the queue (MAST 4.1): assigns regions to several workloads together, with CP-SAT.

If workloads are placed greedily, one at a time, the first may take the only region that the second could use, or the
only one that the second could use without evictions. CP-SAT assigns regions to all workloads of the head, subject to
the total resources of each region. The auction then tries to place each workload in its assigned region, with machines,
racks and victims.

A joint choice is accepted only if it has no disadvantage. Every workload that greedy placement places is still placed,
and is not placed worse by GPU type, capacity kind, price, or the number of jobs that span clusters. For each rank, the
number of victims of that rank and of more important ranks does not grow, nor does the lost work. So the gain is
resources that would have stayed idle, or avoided evictions. Without these conditions, more workloads would be placed at
the expense of running workloads, which would return to the queue. Measured over several days, that is a loss.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from domain.criteria import About, names
from domain.priority import LOWEST_RANK
from domain.scheduling import Bid, Plan
from gms.auction.candidate import Candidate

CPUS = ""
"""Key of the CPU resource; all other keys are GPU types."""
_PROPOSALS = 6
"""Maximum number of choices that are tried."""
_VICTIMS = LOWEST_RANK - 1
"""Index of the total number of victims in a cost vector (`_cost`)."""
_LOSSES = tuple(name for name in names(About.VICTIMS, adding=True) if name != "victims_by_rank")
JointChoice = dict[int, str]
"""Maps positions in the head to region names."""
At = tuple[int, str]
"""Position in the head, and region name."""
Plans = Mapping[int, Plan]
"""Maps positions in the head to the awarded plans."""
Supply = Mapping[str, Mapping[str, int]]
"""Amounts that are free or held by possible victims, by region and resource (a GPU type, or `CPUS` in thousandths)."""


@dataclass(frozen=True)
class Head:
    """The head of the queue, with the bids of each region on each workload on its own."""

    candidates: Sequence[Candidate]
    bids: Sequence[Mapping[str, Bid]]
    supply: Mapping[int, Supply]
    """The supply that a workload of each rank may use, by rank."""


def may_improve(bids: Sequence[Mapping[str, Bid]], alone: Plans) -> bool:
    """Returns whether a joint choice could improve on greedy placement (`alone`).

    That is so if a workload with a plan in its bids was not placed, or if one has more victims than its best bid.
    """
    offers = [[bid.plan for bid in found.values() if bid.plan is not None] for found in bids]
    if any(i not in alone and found for i, found in enumerate(offers)):
        return True
    return any(_victims(plan) > min(map(_victims, offers[i]), default=0) for i, plan in alone.items())


def proposals(head: Head, tried: Sequence[Plans], budget: float) -> Iterator[JointChoice]:
    """Yields up to `_PROPOSALS` distinct choices of regions that may be better than greedy placement, the best first.

    The objective is lexicographic: the number of placed workloads by priority, then fewer victims, then plans that the
    workloads prefer. `tried` has the plans of each attempt so far; the first is the greedy placement, and the caller
    appends the result of each choice. If workloads took the machines of another workload's bid in an attempt, later
    choices do not assign all of them to that region again. `budget` is CP-SAT's deterministic time for all choices; one
    unit is about a second.
    """
    from ortools.sat.python import cp_model  # Imported late: slow to import and rarely needed.

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
    weight = scale * (1 + most[_VICTIMS])  # Exceeds any possible number of victims.
    for rank in reversed(ranks):
        numbers = {i for i, candidate in enumerate(head.candidates) if candidate.request.rank == rank}
        for at in x:
            worth[at] += weight if at[0] in numbers else 0
        weight *= 1 + len(numbers)
    model.maximize(sum(worth[at] * v for at, v in x.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # The caller handles Ctrl-C.
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
    """Yields each bid that failed or needed more victims, together with the earlier bids that took its machines."""
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
    return tuple(ranks.count(rank) for rank in range(1, LOWEST_RANK + 1))


def is_better(head: Head, plans: Plans, than: Plans) -> bool:
    """Returns whether `plans` place more workloads (by priority) than `than`, or as many with fewer victims.

    Also, no workload of `than` may get a worse plan, and no cost of evictions (`_cost`) may grow.
    """
    costs, most = _cost(plans.values()), _cost(than.values())
    if any(cost > limit for cost, limit in zip(costs, most, strict=True)):
        return False
    if any(i not in plans or not _as_good(plans[i], plan) for i, plan in than.items()):
        return False
    return (_by_rank(head, plans), most[_VICTIMS]) > (_by_rank(head, than), costs[_VICTIMS])


def _as_good(plan: Plan, than: Plan) -> bool:
    """Returns whether a plan is at least as good in all placement criteria except the numbers of racks and machines.

    Victims are compared for all workloads together, in `_cost`.
    """
    return all(getattr(plan.quality, name) <= getattr(than.quality, name) for name in names(About.PLACE))


def _victims(plan: Plan) -> int:
    return plan.quality.victims


def _cost(plans: Iterable[Plan]) -> list[int]:
    """Returns the eviction costs that may not grow, as integers.

    These are the numbers of victims at each rank or a more important one, then the other additive criteria about
    victims (lost work, for example), in thousandths.
    """
    made = [plan.quality for plan in plans]
    victims = (sum(quality.victims_by_rank[k] for quality in made) for k in range(LOWEST_RANK))
    others = (sum(1000 * getattr(quality, name) for quality in made) for name in _LOSSES)
    return [*accumulate(victims), *map(round, others)]


def _place(head: Head, i: int, region: str) -> int:
    """Returns the number of plans that the workload prefers to that of `region`."""
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
