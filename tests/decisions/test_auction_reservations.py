"""Reservations in the auction: whom they exclude, how long they last, and where they are made."""

from dataclasses import replace
from math import inf

from domain.reasons import ReasonCode
from domain.scheduling import RegionSnapshot
from gms.auction.auction import Options
from gms.auction.candidate import Candidate

from .fleets import gpu_job, machine, opened_auction, region, request, running

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
    auction = opened_auction([_half_busy()], Options(reserve_after_s=3600.0))
    large, slow, quick, late = auction.place([_LARGE, _small("slow"), _small("quick", 600.0), _small("late", 601.0)])
    assert large.plan is None
    assert large.starts_at_s == _ENDS_S
    assert large.reasons[0].code is ReasonCode.RESERVED
    assert [o.plan is not None for o in (slow, quick, late)] == [False, True, False]


def test_without_a_reservation_small_ones_overtake() -> None:
    """A gang that has not waited long enough gets no reservation."""
    auction = opened_auction([_half_busy()], Options(reserve_after_s=3600.0))
    large, slow = auction.place([replace(_LARGE, waited_s=3600.0), _small("slow")])
    assert large.plan is None
    assert large.starts_at_s is None
    assert slow.plan is not None


def test_over_quota_gangs_reserve_nothing() -> None:
    """However long an over-quota gang has waited, even a known end keeps nothing idle for it."""
    over = replace(_LARGE, request=replace(_LARGE.request, workload="over", rank=8), waited_s=9e9)
    slow = replace(_small("slow"), request=replace(_small("slow").request, rank=8))
    first, other = opened_auction([_half_busy()], Options(reserve_after_s=3600.0)).place([over, slow])
    assert (first.plan, first.starts_at_s, first.retry_at_s) == (None, None, inf) and other.plan is not None


def test_without_a_known_end_only_work_of_its_own_rank_is_kept_out() -> None:
    """If a workload without a maximum runtime must end first, no start is promised, and nothing reserved for a day.

    Workloads of worse rank may use what is free meanwhile, because the gang can evict them.
    """
    endless = replace(_half_busy(), running=(replace(_half_busy().running[0], ends_by_s=inf),))
    same, worse = (
        replace(_small(name), request=replace(_small(name).request, rank=rank))
        for name, rank in (("same", 2), ("worse", 3))
    )
    auction = opened_auction([endless], Options(reserve_after_s=3600.0))
    large, other, filler = auction.place([replace(_LARGE, waited_s=86_401.0), same, worse])
    assert (large.plan, large.starts_at_s, large.reasons[0].code) == (None, None, ReasonCode.RESERVED_OPEN)
    assert (other.plan is None, filler.plan is not None) == (True, True)
    large, other = opened_auction([endless], Options(reserve_after_s=3600.0)).place([_LARGE, same])
    assert ReasonCode.RESERVED_OPEN not in {reason.code for reason in large.reasons} and other.plan is not None


def _protected(until_s: float, rank: int = 7) -> RegionSnapshot:
    """Returns a region with one idle machine and one that a workload of a worse rank holds, protected until a time."""
    holder = replace(running("short", ("m1", 8), rank=rank), protected_until_s=until_s)
    return region([machine("m1", used=8), machine("m2")], [holder])


def test_what_only_protection_keeps_from_a_gang_is_withheld_from_worse_ranks() -> None:
    """From its first refusal on, a gang reserves against worse ranks, but not against its own rank."""
    urgent = replace(_LARGE, waited_s=0.0)
    same = replace(_small("same"), request=replace(_small("same").request, rank=2))
    auction = opened_auction([_protected(_ENDS_S)], Options(reserve_after_s=3600.0))
    large, worse, quick = auction.place([urgent, _small("worse"), _small("quick", 600.0)])
    assert (large.starts_at_s, large.reasons[0].code) == (_ENDS_S, ReasonCode.RESERVED)
    assert (worse.plan, quick.plan) == (None, None)
    assert (
        opened_auction([_protected(_ENDS_S)], Options(reserve_after_s=3600.0)).place([urgent, same])[1].plan is not None
    )


def test_protection_is_not_extended_on_reserved_machines() -> None:
    """A workload whose resources are reserved keeps its protection when its tasks start, but gets no new one."""
    auction = opened_auction([_protected(1100.0)], Options(reserve_after_s=3600.0))
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
    auction = opened_auction([_two_holders()], Options(reserve_after_s=3600.0))
    large, other = auction.place([urgent, middle])
    assert (large.starts_at_s, other.plan) == (1100.0, None)
    assert auction.place([replace(middle, request=replace(middle.request, rank=1))])[0].plan is not None


def test_a_reservation_moves_if_its_source_is_not_of_worse_rank_any_more() -> None:
    """A gang does not keep machines whose holder it may not evict any more, if it fits elsewhere."""
    holders = [replace(running(f"on-m{k}", (f"m{k}", 8), rank=7), protected_until_s=1000.0 + 100 * k) for k in (1, 2)]
    auction = opened_auction(
        [region([machine("m1", used=8), machine("m2", used=8)], holders)], Options(reserve_after_s=3600.0)
    )
    gang = Candidate(replace(request(gpu_job(1, 8), rank=2), workload="gang"))
    assert auction.place([gang])[0].starts_at_s == 1100.0
    auction.regions["here"].put_running(replace(holders[0], rank=2))
    auction.open(1050.0)
    assert auction.place([gang])[0].starts_at_s == 1200.0


def test_a_workload_that_is_placed_again_reserves_once() -> None:
    """After a failed commit, the void outcomes of a batch withhold nothing, also not from their own workloads."""
    auction = opened_auction([_two_holders()], Options(reserve_after_s=3600.0))
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
    outcomes = opened_auction([snapshot], Options(reserve_after_s=3600.0)).place(gangs)
    assert [o.starts_at_s for o in outcomes] == [1100.0, 1200.0, 1300.0, None]


def test_a_reservation_ends_with_its_pass() -> None:
    """A reservation holds no resources; a gang is awarded in the first pass in which all that it needs is free."""
    snapshot = _half_busy()
    auction = opened_auction([snapshot], Options(reserve_after_s=3600.0))
    auction.place([_LARGE])
    here = auction.regions["here"]
    here.put_machine(machine("m1"))
    here.drop_running("keeper")
    auction.open(_ENDS_S)
    (large,) = auction.place([_LARGE])
    assert large.plan is not None


def test_a_gang_goes_on_with_what_it_reserved_unless_it_asks_for_other_gpus() -> None:
    """A gang keeps its reservation even if another region could now start it earlier.

    It is not renewed for a GPU type that the gang no longer accepts.
    """
    soon = replace(_half_busy().running[0], ends_by_s=3000.0)
    a100 = replace(_half_busy(), region="a", running=(soon,))
    other = tuple(machine(name, used=used, gpu_type="v100") for name, used in (("m1", 8), ("m2", 0)))
    v100 = replace(_half_busy(), region="b", machines=other, running=(replace(soon, ends_by_s=2000.0),))
    any_type = replace(_LARGE, request=replace(_LARGE.request, jobs=(gpu_job(2, 8, "a100", "v100"),)))
    auction = opened_auction([a100, v100], Options(reserve_after_s=3600.0))
    regions = []
    for candidate in (any_type, any_type, _LARGE):
        (large,) = auction.place([candidate])
        regions.append(large.reasons[0].detail["region"])
        auction.regions["a"].put_running(replace(soon, ends_by_s=1500.0))
        auction.open(1000.0)
    assert regions == ["b", "b", "a"]


def test_a_reservation_ends_where_the_gang_may_not_run_any_more() -> None:
    """A reservation ends when its machines become voluntary and the gang does not accept that capacity kind."""
    auction = opened_auction([_half_busy()], Options(reserve_after_s=3600.0))
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
    auction = opened_auction(fleet, Options(reserve_after_s=3600.0))
    large, slow = auction.place([_LARGE, _small("slow")])
    assert large.reasons[0].detail["region"] == "b"
    assert slow.plan is not None
    assert slow.plan.region == "a"
