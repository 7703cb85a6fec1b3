"""The auction: batches equal placement one by one, the joint choice drops no workload, and reservations hold."""

from dataclasses import replace
from math import inf
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from auction.auction import Auction, Options
from auction.candidate import Candidate, Outcome
from domain.reasons import ReasonCode
from domain.scheduling import Plan, RegionSnapshot
from rms import reference
from rms.award import Award, revoke
from rms.region import Region
from tests.depth import examples

from . import PROPERTY
from .after_award import after_award
from .fleets import crowded, gpu_job, machine, region, request, running


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


def _auction(fleet: list[RegionSnapshot], options: Options) -> Auction:
    auction = Auction([Region.of(snapshot) for snapshot in fleet], options)
    auction.open(fleet[0].now_s)
    return auction


def _run(auction: Auction, candidates: list[Candidate], sizes: Random) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(candidates):
        size = sizes.randint(1, len(candidates))
        outcomes += auction.place(candidates[len(outcomes) : len(outcomes) + size])
    return outcomes


@settings(PROPERTY, max_examples=examples(60))
@given(st.integers(0, 2**32), st.booleans())
def test_a_batch_is_placed_as_one_at_a_time(seed: int, negative_cache: bool) -> None:
    """For any batch sizes, and with or without the negative cache, the plans equal those of the reference."""
    fleet, candidates = _fleet(seed), _batch(seed, 8)
    auction = _auction(fleet, Options(negative_cache=negative_cache))
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
    plans = [outcome.plan for outcome in _auction(fleet, Options()).place(batch)]
    assert [plan and plan.jobs[0].machines[0][0] for plan in plans] == ["m2", None, "m1", None, None]
    outcomes = _auction(fleet, Options()).place([batch[3], batch[2], batch[0]])
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
    plans = [outcome.plan for outcome in _auction(fleet, Options()).place(batch)]
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
    plans = [outcome.plan for outcome in _auction(fleet, Options()).place(batch)]
    assert [plan and plan.jobs[0].machines[0][0] for plan in plans] == ["m1", "m2", "new", "new", "liar", "liar"]


def test_a_workload_that_evicts_nobody_waits() -> None:
    """Its rank is still that of its plan: a later workload of the same rank does not evict it."""
    fleet = [region([machine("m1", 8, used=8)], [running("low", ("m1", 8))])]
    wanted = request(gpu_job(1, 4), rank=2)
    batch = [Candidate(replace(wanted, workload="meek", evicts=False)), Candidate(replace(wanted, workload="other"))]
    outcomes = _auction(fleet, Options()).place(batch)
    assert [outcome.plan and outcome.plan.victims for outcome in outcomes] == [None, ("low",)]


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
    outcomes = _auction(fleet, Options()).place(candidates, answers)
    states = {snapshot.region: snapshot for snapshot in fleet}
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if outcome.plan is not None:
            assert candidate.may_run_in(outcome.plan.region)
            states[outcome.plan.region] = after_award(states[outcome.plan.region], outcome.plan, candidate.request)


def _roomy(seed: int) -> tuple[list[RegionSnapshot], list[Candidate]]:
    """Returns three small, mostly free regions, some with one GPU type only, and gangs of one or two GPU types."""
    rng = Random(seed)
    fleet = []
    for name in ("r0", "r1", "r2"):
        types = ["a100"] * rng.randint(1, 2) + ["h100"] * rng.choice((0, 0, 1, 2))
        states = [machine(f"{name}m{k}", gpu_type=gpu_type) for k, gpu_type in enumerate(types)]
        holders = []
        if rng.random() < 0.3:
            states.append(machine(f"{name}m9", used=8))
            holders.append(running(f"{name}w", (f"{name}m9", 8), rank=rng.choice((4, 8))))
        fleet.append(replace(region(states, holders), region=name))
    one, two = (gpu_job(1, 8),), (gpu_job(1, 8), gpu_job(1, 8, "h100", name="other"))
    gangs = [(rng.choice((1, 1, 3)), rng.choice((one, two))) for _ in range(rng.randint(2, 6))]
    gangs.sort(key=lambda gang: gang[0])
    return fleet, [
        Candidate(replace(request(*jobs, rank=rank), workload=f"new{k}")) for k, (rank, jobs) in enumerate(gangs)
    ]


def test_roomy_fleets_have_something_to_win() -> None:
    """On the roomy fleets, the joint choice places some workloads that placement one by one does not."""
    gains = 0
    for seed in range(60):
        fleet, candidates = _roomy(seed)
        auction = _auction(fleet, Options(joint=True))
        auction.place(candidates)
        gains += auction.stats.joint_gains
    assert gains > 0


@settings(PROPERTY, max_examples=examples(60))
@given(st.integers(0, 2**32), st.booleans())
def test_together_leaves_nobody_behind(seed: int, roomy: bool) -> None:
    """The joint choice places every workload that placement one by one places, with no more victims or lost work."""
    fleet, candidates = _roomy(seed) if roomy else (_fleet(seed), _batch(seed, 8))
    alone = _auction(fleet, Options()).place(candidates)
    auction = _auction(fleet, Options(joint=True))
    together = auction.place(candidates)
    placed = {o.workload for o in alone if o.plan}
    assert placed <= {o.workload for o in together if o.plan}
    for one, other in zip(alone, together, strict=True):
        if one.plan is not None and other.plan is not None:
            assert other.plan.quality.type_preference <= one.plan.quality.type_preference
    costs, most = _cost(together), _cost(alone)
    assert all(a <= b + 1e-6 for a, b in zip(costs, most, strict=True))
    assert auction.stats.joint_gains == sum(o.plan is not None for o in together) - len(placed)
    states = {snapshot.region: snapshot for snapshot in fleet}
    for candidate, outcome in zip(candidates, together, strict=True):
        if outcome.plan is not None:
            # Raises an error if the plans are not valid together.
            states[outcome.plan.region] = after_award(states[outcome.plan.region], outcome.plan, candidate.request)


def _cost(outcomes: list[Outcome]) -> list[float]:
    """Returns the number of victims up to each rank, and the lost work."""
    plans = [o.plan for o in outcomes if o.plan is not None]
    up_to = [sum(sum(p.quality.victims_by_rank[: k + 1]) for p in plans) for k in range(8)]
    return [*up_to, sum(p.quality.lost_gpu_s for p in plans)]


def _two_regions() -> list[RegionSnapshot]:
    """Returns one region with both GPU types and one with a100 only, both free."""
    here = region([machine("x1"), machine("x2", gpu_type="h100")])
    return [replace(here, region="x"), replace(region([machine("y1")]), region="y")]


def test_the_first_makes_room_for_the_second() -> None:
    """Placed one by one, the first workload takes the second's only region; jointly, both are placed (MAST 4.1)."""
    first = Candidate(replace(request(gpu_job(1, 8)), workload="1"))
    second = Candidate(replace(request(gpu_job(1, 8), gpu_job(1, 8, "h100")), workload="2"))
    alone = _auction(_two_regions(), Options()).place([first, second])
    assert [o.plan and o.plan.region for o in alone] == ["x", None]
    auction = _auction(_two_regions(), Options(joint=True))
    together = auction.place([first, second])
    assert [o.plan and o.plan.region for o in together] == ["y", "x"]
    assert auction.stats.joint_gains == 1


def test_a_joint_choice_that_is_not_told_takes_nothing() -> None:
    """If only the first outcome of a joint choice is consumed, the machines of the second stay free."""
    first = Candidate(replace(request(gpu_job(1, 8)), workload="1"))
    second = Candidate(replace(request(gpu_job(1, 8), gpu_job(1, 8, "h100")), workload="2"))
    auction = _auction(_two_regions(), Options(joint=True))
    outcomes = auction.iter_outcomes([first, second])
    told = next(outcomes)
    assert told.plan is not None and told.plan.region == "y"
    assert auction.bidder("x").supply(1)["a100"] == 0
    outcomes.close()
    assert [auction.bidder("x").supply(1)[t] for t in ("a100", "h100")] == [8, 8]
    assert auction.bidder("y").supply(1)["a100"] == 0


def test_what_was_refused_may_have_room_after_an_award_that_was_not_to_be() -> None:
    """A cached refusal holds only while no resources are released in the pass; then the cache must be cleared."""
    first, second = (Candidate(replace(request(gpu_job(1, 8)), workload=name)) for name in ("1", "2"))
    auction = _auction([region([machine("x1")])], Options())
    won, refused = auction.place([first, second])
    assert won.plan is not None and refused.plan is None
    (name,) = auction.regions
    revoke(auction.regions[name], Award(won.plan, ()))
    assert auction.place([second])[0].plan is None
    auction.forget_refusals()
    assert auction.place([second])[0].plan is not None


def test_together_spares_victims() -> None:
    """If the first workload can use another region for free, the second needs no victim."""
    low = [running("low", ("y2", 8))]
    y = replace(region([machine("y1"), machine("y2", used=8), machine("y3", gpu_type="h100")], low), region="y")
    fleet = [replace(region([machine("z1")]), region="z"), y]
    first = Candidate(replace(request(gpu_job(1, 8)), workload="1"))
    second = Candidate(replace(request(gpu_job(1, 8), gpu_job(1, 8, "h100")), workload="2"))
    alone = _auction(fleet, Options()).place([first, second])
    assert [o.plan and (o.plan.region, o.plan.victims) for o in alone] == [("y", ()), ("y", ("low",))]
    auction = _auction(fleet, Options(joint=True))
    together = auction.place([first, second])
    assert [o.plan and (o.plan.region, o.plan.victims) for o in together] == [("z", ()), ("y", ())]
    assert (auction.stats.joint_gains, auction.stats.joint_spared) == (0, 1)


def test_together_evicts_no_more() -> None:
    """If the second workload could only be placed with an extra eviction, the joint choice lets it wait."""
    fleet = _two_regions()
    full = replace(region([machine("y1", used=8)], [running("low", ("y1", 8))]), region="y")
    first = Candidate(replace(request(gpu_job(1, 8)), workload="1"))
    second = Candidate(replace(request(gpu_job(1, 8), gpu_job(1, 8, "h100")), workload="2"))
    auction = _auction([fleet[0], full], Options(joint=True))
    together = auction.place([first, second])
    assert [o.plan and o.plan.region for o in together] == ["x", None]
    assert (auction.stats.joint_heads, auction.stats.joint_gains) == (1, 0)


def test_equal_bids_go_where_the_slow_path_planned() -> None:
    """Among equal bids, the region planned by Tetris wins; a better bid wins over the plan."""
    fleet = [replace(region([machine(f"{name}1")]), region=name) for name in ("x", "y")]
    candidate = Candidate(request(gpu_job(1, 8)), planned_region="y")
    (outcome,) = _auction(fleet, Options()).place([candidate])
    assert outcome.plan is not None
    assert outcome.plan.region == "y"
    busy = replace(region([machine("y1", used=8)], [running("low", ("y1", 8))]), region="y")
    (outcome,) = _auction([fleet[0], busy], Options()).place([candidate])
    assert outcome.plan is not None
    assert outcome.plan.region == "x"


# -------------------------------------------------------------------------------------------------------- reservations

_ENDS_S = 1600.0


def _half_busy() -> RegionSnapshot:
    """Returns two machines; one is busy until at most 1,600 s with a workload that may not be evicted."""
    keeper = replace(running("keeper", ("m1", 8), rank=1), ends_by_s=_ENDS_S)
    return region([machine("m1", used=8), machine("m2")], [keeper])


def _small(name: str, max_runtime_s: float = inf) -> Candidate:
    return Candidate(replace(request(gpu_job(1, 4), rank=3), workload=name), max_runtime_s=max_runtime_s)


_LARGE = Candidate(replace(request(gpu_job(2, 8), rank=2), workload="large"), waited_s=7200.0)


def test_what_frees_up_is_kept_for_a_large_gang() -> None:
    """A gang that has waited too long gets a reservation; only workloads that end before its start may use it."""
    auction = _auction([_half_busy()], Options(reserve_after_s=3600.0))
    large, slow, quick, late = auction.place([_LARGE, _small("slow"), _small("quick", 600.0), _small("late", 601.0)])
    assert large.plan is None
    assert large.starts_at_s == _ENDS_S
    assert large.reasons[0].code is ReasonCode.RESERVED
    assert [o.plan is not None for o in (slow, quick, late)] == [False, True, False]


def test_without_a_reservation_small_ones_overtake() -> None:
    """A gang that has not waited long enough gets no reservation."""
    auction = _auction([_half_busy()], Options(reserve_after_s=3600.0))
    large, slow = auction.place([replace(_LARGE, waited_s=3600.0), _small("slow")])
    assert large.plan is None
    assert large.starts_at_s is None
    assert slow.plan is not None


def test_over_quota_gangs_reserve_what_those_within_quota_leave() -> None:
    """An over-quota gang's reservation excludes other over-quota work, but a gang within quota reserves first."""
    over = replace(_LARGE, request=replace(_LARGE.request, workload="over", rank=8))
    slow = replace(_small("slow"), request=replace(_small("slow").request, rank=8))
    first, waits = _auction([_half_busy()], Options(reserve_after_s=3600.0)).place([over, slow])
    assert (first.plan, first.starts_at_s, waits.plan) == (None, _ENDS_S, None)
    large, second = _auction([_half_busy()], Options(reserve_after_s=3600.0)).place([_LARGE, over])
    assert (large.starts_at_s, second.starts_at_s) == (_ENDS_S, None)


def test_a_known_start_is_within_half_of_the_time_that_an_over_quota_gang_has_waited() -> None:
    """An over-quota gang gets a reservation with a known start only if it starts within half of its wait so far."""
    over = replace(_LARGE, request=replace(_LARGE.request, workload="over", rank=8))
    slow = replace(_small("slow"), request=replace(_small("slow").request, rank=8))
    for waited_s, keeps in ((1199.0, False), (1200.0, True)):
        auction = _auction([_half_busy()], Options(reserve_after_s=1000.0))
        first, other = auction.place([replace(over, waited_s=waited_s), slow])
        assert (first.starts_at_s is not None, other.plan is None) == (keeps, keeps), waited_s
    within = replace(_LARGE, waited_s=1001.0)
    assert _auction([_half_busy()], Options(reserve_after_s=1000.0)).place([within])[0].starts_at_s == _ENDS_S


def test_without_a_known_end_only_work_of_its_own_rank_is_kept_out() -> None:
    """If a workload without a maximum runtime must end first, no start is promised.

    Workloads of worse rank may use what is free meanwhile, because the gang can evict them.
    """
    endless = replace(_half_busy(), running=(replace(_half_busy().running[0], ends_by_s=inf),))
    same, worse = (
        replace(_small(name), request=replace(_small(name).request, rank=rank))
        for name, rank in (("same", 2), ("worse", 3))
    )
    auction = _auction([endless], Options(reserve_after_s=3600.0))
    large, other, filler = auction.place([_LARGE, same, worse])
    assert (large.plan, large.starts_at_s, large.reasons[0].code) == (None, None, ReasonCode.RESERVED_OPEN)
    assert (other.plan is None, filler.plan is not None) == (True, True)


def _protected(until_s: float, rank: int = 7) -> RegionSnapshot:
    """Returns a region with one idle machine and one that a workload of a worse rank holds, protected until a time."""
    holder = replace(running("short", ("m1", 8), rank=rank), protected_until_s=until_s)
    return region([machine("m1", used=8), machine("m2")], [holder])


def test_what_only_protection_keeps_from_a_gang_is_withheld_from_worse_ranks() -> None:
    """From its first refusal on, a gang reserves against worse ranks, but not against its own rank."""
    urgent = replace(_LARGE, waited_s=0.0)
    same = replace(_small("same"), request=replace(_small("same").request, rank=2))
    auction = _auction([_protected(_ENDS_S)], Options(reserve_after_s=3600.0))
    large, worse, quick = auction.place([urgent, _small("worse"), _small("quick", 600.0)])
    assert (large.starts_at_s, large.reasons[0].code) == (_ENDS_S, ReasonCode.RESERVED)
    assert (worse.plan, quick.plan) == (None, None)
    assert _auction([_protected(_ENDS_S)], Options(reserve_after_s=3600.0)).place([urgent, same])[1].plan is not None


def test_protection_is_not_extended_on_reserved_machines() -> None:
    """A workload whose resources are reserved keeps its protection when its tasks start, but gets no new one."""
    auction = _auction([_protected(1100.0)], Options(reserve_after_s=3600.0))
    urgent = replace(_LARGE, waited_s=0.0)
    assert auction.place([urgent])[0].starts_at_s == 1100.0
    auction.regions["here"].put_running(replace(_protected(1500.0).running[0]))
    auction.open(1100.0)
    (large,) = auction.place([urgent])
    assert large.plan is not None
    assert large.plan.victims == ("short",)


def _two_holders() -> RegionSnapshot:
    """Returns two full machines: the holder of the first is protected until 1100, that of the second is not."""
    holders = [replace(running("late", ("m1", 8), rank=7), protected_until_s=1100.0), running("now", ("m2", 8), rank=7)]
    return region([machine("m1", used=8), machine("m2", used=8)], holders)


def test_worse_ranks_do_not_evict_the_sources_of_a_reservation() -> None:
    """A workload of worse rank would take the place of a workload that the gang is going to evict."""
    urgent, middle = (
        Candidate(replace(request(gpu_job(tasks, 8), rank=rank), workload=f"rank{rank}"))
        for tasks, rank in ((2, 2), (1, 5))
    )
    auction = _auction([_two_holders()], Options(reserve_after_s=3600.0))
    large, other = auction.place([urgent, middle])
    assert (large.starts_at_s, other.plan) == (1100.0, None)
    assert auction.place([replace(middle, request=replace(middle.request, rank=1))])[0].plan is not None


def test_reservations_hold_in_the_joint_choice() -> None:
    """The joint choice ends before a workload that a reservation of another may exclude."""
    urgent = replace(_LARGE, waited_s=0.0)
    auction = _auction([_protected(_ENDS_S)], Options(reserve_after_s=3600.0, joint=True))
    large, worse = auction.place([urgent, _small("worse")])
    assert (large.starts_at_s, worse.plan) == (_ENDS_S, None)


def test_a_reservation_moves_if_its_source_is_not_of_worse_rank_any_more() -> None:
    """A gang does not keep machines whose holder it may not evict any more, if it fits elsewhere."""
    holders = [replace(running(f"on-m{k}", (f"m{k}", 8), rank=7), protected_until_s=1000.0 + 100 * k) for k in (1, 2)]
    auction = _auction(
        [region([machine("m1", used=8), machine("m2", used=8)], holders)], Options(reserve_after_s=3600.0)
    )
    gang = Candidate(replace(request(gpu_job(1, 8), rank=2), workload="gang"))
    assert auction.place([gang])[0].starts_at_s == 1100.0
    auction.regions["here"].put_running(replace(holders[0], rank=2))
    auction.open(1050.0)
    assert auction.place([gang])[0].starts_at_s == 1200.0


def test_a_workload_that_is_placed_again_reserves_once() -> None:
    """After a failed commit, the void outcomes of a batch withhold nothing, also not from their own workloads."""
    auction = _auction([_two_holders()], Options(reserve_after_s=3600.0))
    gang = Candidate(replace(request(gpu_job(2, 8), rank=2), workload="gang"))
    for _ in range(2):
        assert auction.place([gang])[0].starts_at_s == 1100.0
        assert len(auction.bidder("here").reservations) == 1
    auction.drop_reservation("gang")
    assert not auction.bidder("here").reservations


def test_two_gangs_reserve_different_machines_in_one_pass() -> None:
    """The second gang does not count on what the first one has reserved."""
    holders = [
        replace(running(f"short{k}", (f"m{k}", 8), rank=7), protected_until_s=1000.0 + 100 * k) for k in (1, 2, 3)
    ]
    snapshot = region([machine(f"m{k}", used=8) for k in (1, 2, 3)], holders)
    gangs = [Candidate(replace(request(gpu_job(1, 8), rank=2), workload=f"gang{k}")) for k in (1, 2, 3, 4)]
    outcomes = _auction([snapshot], Options(reserve_after_s=3600.0)).place(gangs)
    assert [o.starts_at_s for o in outcomes] == [1100.0, 1200.0, 1300.0, None]


def test_a_reservation_ends_with_its_pass() -> None:
    """A reservation holds no resources; a gang is awarded in the first pass in which all that it needs is free."""
    snapshot = _half_busy()
    auction = _auction([snapshot], Options(reserve_after_s=3600.0))
    auction.place([_LARGE])
    here = auction.regions["here"]
    here.put_machine(machine("m1"))
    here.drop_running("keeper")
    auction.open(_ENDS_S)
    (large,) = auction.place([_LARGE])
    assert large.plan is not None


def test_a_gang_goes_on_with_what_it_reserved_unless_it_asks_for_other_gpus() -> None:
    """A gang's reservation is renewed even if another region could start it earlier by now.

    It is not renewed for a GPU type that the gang no longer accepts.
    """
    soon = replace(_half_busy().running[0], ends_by_s=3000.0)
    a100 = replace(_half_busy(), region="a", running=(soon,))
    other = tuple(machine(name, used=used, gpu_type="v100") for name, used in (("m1", 8), ("m2", 0)))
    v100 = replace(_half_busy(), region="b", machines=other, running=(replace(soon, ends_by_s=2000.0),))
    any_type = replace(_LARGE, request=replace(_LARGE.request, jobs=(gpu_job(2, 8, "a100", "v100"),)))
    auction = _auction([a100, v100], Options(reserve_after_s=3600.0))
    regions = []
    for candidate in (any_type, any_type, _LARGE):
        (large,) = auction.place([candidate])
        regions.append(large.reasons[0].detail["region"])
        auction.regions["a"].put_running(replace(soon, ends_by_s=1500.0))
        auction.open(1000.0)
    assert regions == ["b", "b", "a"]


def test_a_reservation_ends_where_the_gang_may_not_run_any_more() -> None:
    """A reservation ends when its machines become voluntary and the gang does not accept that capacity kind."""
    auction = _auction([_half_busy()], Options(reserve_after_s=3600.0))
    lent = _small("lent")
    lent = replace(lent, request=replace(lent.request, jobs=(replace(gpu_job(1, 4), capacity=("voluntary",)),)))
    assert auction.place([_LARGE])[0].starts_at_s == _ENDS_S
    for one in _half_busy().machines:
        auction.regions["here"].put_machine(replace(one, capacity="voluntary"))
    auction.open(1000.0)
    large, other = auction.place([_LARGE, lent])
    assert large.starts_at_s is None
    assert other.plan is not None


def test_the_region_that_can_start_it_soonest() -> None:
    """The gang reserves in the region with the earliest start; other regions stay available."""
    later = replace(_half_busy().running[0], ends_by_s=9000.0)
    fleet = [replace(_half_busy(), region="a", running=(later,)), replace(_half_busy(), region="b")]
    auction = _auction(fleet, Options(reserve_after_s=3600.0))
    large, slow = auction.place([_LARGE, _small("slow")])
    assert large.reasons[0].detail["region"] == "b"
    assert slow.plan is not None
    assert slow.plan.region == "a"
