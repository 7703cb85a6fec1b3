"""Regions that miss the deadline for bids are left out, probed with backoff, and used again when they respond."""

import random

from gms.auction.silence import Asking, ProbeBackoff, Silence

REGIONS = ["east", "north", "west"]


def test_a_region_that_misses_the_deadline_is_silent_at_once() -> None:
    """A region that misses the deadline is neither waited for nor probed before its first pause has ended."""
    silence = Silence(ProbeBackoff(2.0, 60.0))
    assert silence.asking(REGIONS, 100.0) == Asking(REGIONS, [])
    silence.miss("west", 100.0, 102.0)
    assert silence.silent == ["west"] and silence.missed["west"].since_s == 100.0
    assert silence.asking(REGIONS, 103.0) == Asking(["east", "north"], [])
    assert silence.asking(REGIONS, 104.0) == Asking(["east", "north"], ["west"])
    assert silence.asking(REGIONS, 104.0) == Asking(["east", "north"], [])


def test_pauses_double_up_to_the_longest() -> None:
    """A region that never responds is probed after 2, 4, 8, ... seconds, and finally every 60 s."""
    silence = Silence(ProbeBackoff(2.0, 60.0))
    silence.miss("west", 0.0, 0.0)
    now_s, pauses = 0.0, []
    for _ in range(8):
        due_s = silence.due_s(now_s)
        assert due_s is not None
        pauses.append(due_s)
        now_s += due_s
        assert silence.asking(REGIONS, now_s).probed == ["west"]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert ProbeBackoff(2.0, 60.0).pause_s(10_000) == 60.0


def test_an_answer_in_time_ends_it() -> None:
    """After a response in time, the region is waited for again, and its next miss starts with the first pause."""
    silence = Silence(ProbeBackoff(2.0, 60.0))
    silence.miss("west", 0.0, 0.0)
    silence.asking(REGIONS, 50.0)
    silence.answer("west", in_time=True)
    assert silence.silent == [] and silence.due_s(50.0) is None
    assert silence.asking(REGIONS, 50.0) == Asking(REGIONS, [])
    silence.miss("west", 60.0, 62.0)
    assert silence.due_s(62.0) == 2.0


def test_a_slow_region_is_not_left_out_while_it_answers() -> None:
    """A region that responds late is probed and not waited for; it is left out only if a probe gets no response."""
    silence = Silence(ProbeBackoff(2.0, 60.0))
    silence.miss("west", 0.0, 2.0)
    silence.answer("west", in_time=False)
    assert silence.silent == []
    assert silence.asking(REGIONS, 4.0) == Asking(["east", "north"], ["west"])
    assert silence.silent == [], "a slow region must not count as silent while it is probed"
    silence.answer("west", in_time=False)
    assert silence.asking(REGIONS, 20.0).probed == ["west"] and silence.silent == []
    assert silence.asking(REGIONS, 100.0).probed == ["west"]
    assert silence.silent == ["west"], "the region must be silent because the previous probe got no response"
    assert silence.missed["west"].since_s == 0.0


def test_a_miss_that_is_told_again_changes_nothing() -> None:
    """Repeated reports of the same miss have no effect; every award of a pass reports the regions that it left out."""
    silence = Silence()
    silence.miss("west", 0.0, 2.0)
    known = silence.missed["west"]
    silence.miss("west", 0.0, 60.0)
    assert silence.missed["west"] == known


def test_regions_that_are_removed_are_forgotten() -> None:
    """A removed region is no longer silent."""
    silence = Silence()
    silence.miss("west", 0.0, 2.0)
    silence.asking(["east"], 3.0)
    assert silence.silent == [] and silence.due_s(3.0) is None


def test_every_region_is_waited_for_or_asked_again_in_bounded_time() -> None:
    """A region that is waited for has no miss, and one with a miss is probed within the longest pause."""
    chance = random.Random(5)
    silence, now_s, asked_s = Silence(ProbeBackoff(1.0, 8.0)), 0.0, dict.fromkeys(REGIONS, 0.0)
    for _ in range(2000):
        now_s += chance.expovariate(1.0)
        asking = silence.asking(REGIONS, now_s)
        assert not set(asking.waited_for) & silence.missed.keys()
        for region in (*asking.waited_for, *asking.probed):
            asked_s[region] = now_s
        assert all(missed.next_s - asked_s[region] <= 8.001 for region, missed in silence.missed.items())
        for region in asking.waited_for:
            if chance.random() < 0.2:
                silence.miss(region, now_s, now_s)
        for region in REGIONS:
            if chance.random() < 0.2:
                silence.answer(region, in_time=chance.random() < 0.5)
