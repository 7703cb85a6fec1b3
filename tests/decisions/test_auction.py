"""The auction: batches equal placement one by one."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.reasons import ReasonCode
from domain.scheduling import Plan, RegionSnapshot
from gms.auction.auction import Auction, Options
from gms.auction.candidate import AuctionOutcome, Candidate
from reference import bids as reference
from rms.award import Award, revoke
from tests.depth import examples

from . import PROPERTY
from .after_award import after_award
from .fleets import crowded, gpu_job, machine, opened_auction, region, request, running


def _fleet(seed: int, size: int = 3) -> list[RegionSnapshot]:
    return [replace(crowded(seed + n)[0], region=f"r{n}") for n in range(size)]


def _batch(seed: int, size: int) -> list[Candidate]:
    """Returns requests sorted by rank, some of them restricted to certain regions."""
    rng = Random(seed)
    asked = [replace(crowded(seed + n)[1], workload=f"new{n}") for n in range(size)]
    asked.sort(key=lambda r: r.rank)
    return [
        Candidate(
            r,
            regions=None if rng.random() < 0.7 else frozenset({f"r{rng.randrange(3)}"}),
            planned_region=rng.choice([None, "r0", "r2"]),
        )
        for r in asked
    ]


def _one_at_a_time(fleet: list[RegionSnapshot], candidates: list[Candidate]) -> list[Plan | None]:
    """Returns the plans that reference bids give, one workload after the other, each after the awards before it."""
    states = {snapshot.region: snapshot for snapshot in fleet}
    out = []
    for candidate in candidates:
        bids = [reference.bid(state, candidate.request) for name, state in states.items() if candidate.may_run_in(name)]
        best = min((b.plan for b in bids if b.plan is not None), default=None, key=candidate.preference)
        if best is not None:
            states[best.region] = after_award(states[best.region], best, candidate.request)
        out.append(best)
    return out


def _run(auction: Auction, candidates: list[Candidate], sizes: Random) -> list[AuctionOutcome]:
    outcomes: list[AuctionOutcome] = []
    while len(outcomes) < len(candidates):
        size = sizes.randint(1, len(candidates))
        outcomes += auction.place(candidates[len(outcomes) : len(outcomes) + size])
    return outcomes


@settings(PROPERTY, max_examples=examples(60))
@given(st.integers(0, 2**32), st.booleans())
def test_a_batch_is_placed_as_one_at_a_time(seed: int, negative_cache: bool) -> None:
    """For any batch sizes, and with or without the negative cache, the plans equal those of the reference."""
    fleet, candidates = _fleet(seed), _batch(seed, 8)
    auction = opened_auction(fleet, Options(negative_cache=negative_cache))
    outcomes = _run(auction, candidates, Random(seed))
    assert [outcome.plan for outcome in outcomes] == _one_at_a_time(fleet, candidates)
    for outcome in outcomes:
        assert (outcome.plan is None) == bool(outcome.reasons)
    assert auction.stats.awards == sum(outcome.plan is not None for outcome in outcomes)
    assert negative_cache or not auction.stats.negative_hits


def test_machines_that_one_workload_avoids_are_there_for_others() -> None:
    """No cached plan or refusal is used for an equal workload that avoids other machines."""
    fleet = [region([machine("m1", 8, used=4), machine("m2", 8, used=4)])]
    wanted = request(gpu_job(1, 4))
    avoids = [{"m1"}, {"m1"}, set(), {"m1", "m2"}, set()]
    batch = [
        Candidate(replace(wanted, workload=f"w{n}", avoids=frozenset(machines))) for n, machines in enumerate(avoids)
    ]
    plans = [outcome.plan for outcome in opened_auction(fleet, Options()).place(batch)]
    assert [plan and plan.jobs[0].machines[0][0] for plan in plans] == ["m2", None, "m1", None, None]
    outcomes = opened_auction(fleet, Options()).place([batch[3], batch[2], batch[0]])
    assert [outcome.plan and outcome.plan.jobs[0].machines[0][0] for outcome in outcomes] == [None, "m1", "m2"]
    assert outcomes[0].reasons[-1].code is ReasonCode.MACHINES_AVOIDED


def test_shunned_machines_are_used_last() -> None:
    """A plan without them comes first, also if packing is worse, but not if it evicts more. Others differ."""
    fleet = [
        region([machine("m1", 8, used=4), machine("m2", 8), machine("m3", 8, used=8)], [running("low", ("m3", 8))])
    ]
    wanted = request(gpu_job(1, 4), rank=2)
    shuns = [{"m1"}, set(), {"m2"}, {"m2"}]
    batch = [
        Candidate(replace(wanted, workload=f"w{n}", shuns=frozenset(machines))) for n, machines in enumerate(shuns)
    ]
    plans = [outcome.plan for outcome in opened_auction(fleet, Options()).place(batch)]
    assert [plan and (plan.jobs[0].machines[0][0], plan.victims) for plan in plans] == [
        ("m2", ()), ("m1", ()), ("m2", ()), ("m3", ("low",)),
    ]  # fmt: skip


def test_a_machine_that_fails_or_has_run_nothing_is_used_last() -> None:
    """Whatever it claims: proven machines come first in each region, then untried ones, then those that failed."""
    one = [machine("liar", 62), machine("m1", 4), machine("m2", 4)]
    fleet = [region(one), replace(region([machine("new", 8)]), region="second")]
    wanted = request(gpu_job(1, 4), rank=2)
    wanted = replace(wanted, failed=frozenset({"liar"}), untried=frozenset({"new"}))
    batch = [Candidate(replace(wanted, workload=f"w{n}")) for n in range(6)]
    plans = [outcome.plan for outcome in opened_auction(fleet, Options()).place(batch)]
    assert [plan and plan.jobs[0].machines[0][0] for plan in plans] == ["m1", "m2", "new", "new", "liar", "liar"]


@settings(PROPERTY, max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_bids_from_elsewhere_decide_nothing_that_does_not_hold(seed: int) -> None:
    """If first bids were made on other data, or are missing, every awarded plan is still valid."""
    fleet, candidates = _fleet(seed), _batch(seed, 6)
    other = {s.region: s for s in _fleet(seed + 1)}
    answers = [
        {name: reference.bid(state, candidate.request) for name, state in other.items() if Random(seed).random() < 0.8}
        for candidate in candidates
    ]
    outcomes = opened_auction(fleet, Options()).place(candidates, answers)
    states = {snapshot.region: snapshot for snapshot in fleet}
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if outcome.plan is not None:
            assert candidate.may_run_in(outcome.plan.region)
            states[outcome.plan.region] = after_award(states[outcome.plan.region], outcome.plan, candidate.request)


def test_what_was_refused_may_have_room_after_an_award_that_was_not_to_be() -> None:
    """A cached refusal holds only while no resources are released in the pass; then the cache must be cleared."""
    first, second = (Candidate(replace(request(gpu_job(1, 8)), workload=name)) for name in ("1", "2"))
    auction = opened_auction([region([machine("x1")])], Options())
    won, refused = auction.place([first, second])
    assert won.plan is not None and refused.plan is None
    (name,) = auction.regions
    revoke(auction.regions[name], Award(won.plan, ()))
    assert auction.place([second])[0].plan is None
    auction.forget_refusals()
    assert auction.place([second])[0].plan is not None


def test_equal_bids_go_where_the_slow_path_planned() -> None:
    """Among equal bids, the region planned by Tetris wins; a better bid wins over the plan."""
    fleet = [replace(region([machine(f"{name}1")]), region=name) for name in ("x", "y")]
    candidate = Candidate(request(gpu_job(1, 8)), planned_region="y")
    (outcome,) = opened_auction(fleet, Options()).place([candidate])
    assert outcome.plan is not None
    assert outcome.plan.region == "y"
    busy = replace(region([machine("y1", used=8)], [running("low", ("y1", 8))]), region="y")
    (outcome,) = opened_auction([fleet[0], busy], Options()).place([candidate])
    assert outcome.plan is not None
    assert outcome.plan.region == "x"


# -------------------------------------------------------------------------------------------------------- reservations


@pytest.mark.parametrize("negative_cache", [False, True])
def test_time_alone_gives_no_hardware(negative_cache: bool) -> None:
    """A workload that would not even fit into an empty region does not wait for the end of a protection, also if it is
    refused like an earlier one.
    """
    protected = replace(running("young", ("m1", 8), rank=9), protected_until_s=1900.0)
    auction = opened_auction([region([machine("m1", used=8)], [protected])], Options(negative_cache=negative_cache))
    asked = [replace(request(gpu_job(1, gpus)), workload=f"w{k}") for k, gpus in enumerate((9, 9, 8))]
    assert [one.retry_at_s for one in auction.place([*map(Candidate, asked)])] == [inf, inf, 1900.0]
