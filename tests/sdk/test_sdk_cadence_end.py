"""The save interval if the end of the machines is known: against reference computations and in simulated runs."""

import random
from collections.abc import Callable
from itertools import pairwise
from math import exp, inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.cadence import (
    Cadence,
    best_interval_s,
    best_until_end,
    choose,
    expected_time_until_end,
    mtbf,
    mtbf_of_environ,
)
from mizzen.cadence.interruptions import SLURM_LEAD_S

H = 3600.0


def saved(mtbf_s: float, save_s: float, interval_s: float, ends_in_s: float) -> float:
    """Returns the expected work in seconds that is saved by the end, summed over the saves."""
    part_s = interval_s + save_s
    total, ends = 0.0, part_s
    while interval_s > 0 and ends <= ends_in_s * (1 + 1e-9):
        total += interval_s * exp(-ends / mtbf_s)
        ends += part_s
    return total


def divided_freely(mtbf_s: float, save_s: float, ends_in_s: float, cells: int = 300) -> float:
    """Returns the greatest expected saved work with intervals of any lengths in whole cells, by dynamic programming."""
    cell_s = ends_in_s / cells
    best = [0.0]
    for left in range(1, cells + 1):
        parts = ((n * cell_s - save_s + best[left - n]) * exp(-n * cell_s / mtbf_s) for n in range(1, left + 1))
        best.append(max(best[-1], *parts))
    return best[-1]


@given(st.floats(10, 1e6), st.floats(1e-3, 3), st.floats(0.01, 6))
def test_no_interval_saves_more_before_the_end(mtbf_s: float, part: float, length: float) -> None:
    """The expected saved work is within 0.1% of the best of 400 numbers of saves and 400 fixed intervals."""
    save_s, ends_in_s = part * mtbf_s, length * mtbf_s
    interval_s, saves = best_until_end(mtbf_s, save_s, ends_in_s)
    tried = [ends_in_s / k - save_s for k in range(1, 401)] + [ends_in_s * n / 400 for n in range(1, 401)]
    least = max(saved(mtbf_s, save_s, one_s, ends_in_s) for one_s in tried)
    if saves:
        assert saves * (interval_s + save_s) <= ends_in_s * (1 + 1e-9)
        assert saved(mtbf_s, save_s, interval_s, ends_in_s) >= 0.999 * least
    else:
        assert least == 0 and interval_s == 0


def test_parts_of_other_lengths_save_no_more() -> None:
    """In random cases, intervals of unequal lengths save at most 0.1% more work."""
    rng = random.Random(1)
    for _ in range(20):
        mtbf_s = 10 ** rng.uniform(2, 6)
        save_s, ends_in_s = mtbf_s * 10 ** rng.uniform(-2, -1), mtbf_s * 10 ** rng.uniform(-1, 0.5)
        interval_s, saves = best_until_end(mtbf_s, save_s, ends_in_s)
        if saves:
            assert saved(mtbf_s, save_s, interval_s, ends_in_s) >= 0.999 * divided_freely(mtbf_s, save_s, ends_in_s)


@given(st.floats(10, 1e6), st.floats(0.001, 1), st.floats(0.01, 5), st.floats(0.01, 5))
def test_the_expected_time_is_life_over_saved_work(mtbf_s: float, part: float, length: float, interval: float) -> None:
    """The expected time is the mean time to the first interruption, divided by the expected saved work."""
    save_s, ends_in_s, interval_s = part * mtbf_s, length * mtbf_s, interval * mtbf_s
    work_s = saved(mtbf_s, save_s, interval_s, ends_in_s)
    expected = mtbf_s * (1 - exp(-ends_in_s / mtbf_s)) / work_s if work_s else inf
    assert expected_time_until_end(mtbf_s, save_s, interval_s, ends_in_s) == pytest.approx(expected)


def test_where_saves_are_long_the_time_is_not_filled() -> None:
    """If a save takes as long as the MTBF, two short intervals save more work than two that fill the time."""
    interval_s, saves = best_until_end(10, 10, 40)
    assert saves == 2 and interval_s < 9
    assert saved(10, 10, interval_s, 40) > 1.005 * saved(10, 10, 10, 40)


def test_far_from_the_end_it_is_the_plain_interval() -> None:
    """If the end is far away, the interval is close to the interval without an end."""
    plain_s, _ = best_interval_s(10_800, 30)
    interval_s, saves = best_until_end(10_800, 30, 1e7)
    assert interval_s == pytest.approx(plain_s, rel=0.03)
    assert saves == int(1e7 / (interval_s + 30))


def test_a_choice_with_an_end() -> None:
    """With 3 hours left and saves of 30 s: 13 intervals of 801 s, not 12 of 805 s and a remainder that is lost."""
    found = mtbf(gang_mtbf_s=3 * H)
    chosen = choose(found, 30, 2, ends_in_s=3 * H)
    assert (chosen.rule, chosen.saves, chosen.steps) == ("end", 13, 400)
    assert chosen.interval_s == pytest.approx(3 * H / 13 - 30)
    text = " ".join(chosen.sentences())
    assert "13 saves are best until the end in 10,800 s: 801 s of work for each." in text
    one = choose(found, 30, 2, ends_in_s=600)
    assert one.saves == 1 and "One save is best" in " ".join(one.sentences()) and one.overhead < 0.1


def test_what_wins_over_an_end() -> None:
    """A fixed interval takes precedence over the end, an end too near for a save is ignored, and write times count."""
    found = mtbf(gang_mtbf_s=3 * H)
    assert choose(found, 30, 2, interval_s=100, ends_in_s=3 * H).interval_s == 100
    plain = choose(found, 30, 2)
    for ends_in_s in (1, 30):
        assert choose(found, 30, 2, ends_in_s=ends_in_s).interval_s == plain.interval_s
    assert choose(found, 0, 2, ends_in_s=3 * H).steps == 1
    slow = choose(found, 30, 2, write_s=1500, ends_in_s=3 * H)
    # The last write finishes exactly at the end, and writes do not overlap.
    assert slow.saves and slow.saves * (slow.interval_s + 30) + 1500 == pytest.approx(3 * H)
    assert slow.interval_s >= 1500


@pytest.mark.parametrize("bad", [0, -1, nan, inf])
def test_an_end_is_ahead(bad: float) -> None:
    """An `ends_in_s` that is not a positive finite number is an error that names it."""
    found = mtbf(gang_mtbf_s=3 * H)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: choose(found, 30, 2, ends_in_s=bad),
        lambda: best_until_end(100, 1, bad),
        lambda: expected_time_until_end(100, 1, 10, bad),
        lambda: Cadence(found, ends_in_s=bad),
        lambda: Cadence(found).update(ends_in_s=bad),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"ends_in_s=.*: must be more than 0 seconds"):
            call()


def lived(
    ends_s: float, told: bool, takes_s: Callable[[], float] = lambda: 30.0, save_s: float | None = 30.0
) -> tuple[float, list[float]]:
    """Simulates a run that ends at `ends_s`; returns the saved work in seconds and the end time of each save."""
    now_s, done_s, steps = 0.0, 0.0, 0
    ends: list[float] = []
    end_s = ends_s if told else None
    cadence = Cadence(mtbf(gang_mtbf_s=3 * H), save_s=save_s, clock=lambda: now_s, ends_in_s=end_s)
    cadence.begin(0)
    while now_s < ends_s:
        now_s += 2
        steps += 1
        if cadence.should_save(steps):
            took_s = takes_s()
            now_s += took_s
            if now_s <= ends_s:
                done_s = 2.0 * steps
                ends.append(now_s)
            cadence.saved(steps, took_s)
    return done_s, ends


@pytest.mark.parametrize("hours", [1, 2, 3, 6, 24])
def test_a_fixed_life_is_used_to_its_end(hours: int) -> None:
    """If the end is known, the run loses at most half a save and three steps, besides the time of the saves."""
    work_s, ends = lived(hours * H, told=True)
    lost_s = hours * H - work_s - 30 * len(ends)
    assert 0 <= lost_s < 15 + 3 * 2.0
    assert work_s > lived(hours * H, told=False)[0] or hours == 1


def test_the_last_save_may_take_longer() -> None:
    """If save times vary by up to a third, the last save still completes before the end."""
    for seed in range(20):
        rng = random.Random(seed)
        work_s, ends = lived(3 * H, told=True, takes_s=lambda rng=rng: rng.uniform(20, 40))  # type: ignore[misc]
        assert ends[-1] > 3 * H - 80 and work_s > 3 * H - 40 * len(ends) - 80


def test_nothing_rests_on_a_first_save_of_unknown_length() -> None:
    """If no save has been measured, the first one starts in the first half of the time, so that a slow save fits."""
    _, ends = lived(600, told=True, takes_s=lambda: 60.0, save_s=None)
    assert 300 <= ends[0] <= 360 and len(ends) == 2 and ends[1] > 500


def test_an_end_that_did_not_come_is_forgotten() -> None:
    """After the end has passed, as when a time limit was raised, the plain interval applies; a new end takes effect."""
    now_s, steps, saves = 0.0, 0, []
    cadence = Cadence(mtbf(gang_mtbf_s=3 * H), clock=lambda: now_s, ends_in_s=1800, save_s=30)
    cadence.begin(0)
    for steps in range(1, 5000):
        now_s += 2
        if cadence.should_save(steps):
            now_s += 30
            cadence.saved(steps, 30)
            saves.append(now_s)
    later = [b - a for a, b in pairwise(saves) if a > 1800]
    assert len(later) > 5 and all(830 <= gap <= 840 for gap in later)
    assert cadence.explain().rule == "young"
    cadence.update(ends_in_s=1000)
    assert cadence.explain().rule == "end"


def test_the_time_of_a_load_counts() -> None:
    """The time between the creation and `begin` is subtracted from the time left."""
    now_s = 0.0
    cadence = Cadence(mtbf(gang_mtbf_s=100 * H), clock=lambda: now_s, ends_in_s=1000, save_s=10)
    now_s = 400.0
    cadence.begin(5)
    assert cadence.explain().ends_in_s == pytest.approx(600 - 5)
    for step in range(6, 600):
        now_s += 1
        if cadence.should_save(step):
            break
    assert 975 <= now_s <= 986


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is read from MIZZEN_ENDS_AT_S, or is Slurm's time limit less the notice's lead. A past end is ignored."""
    monkeypatch.setattr("time.time", lambda: 1e9)

    def ends_in_s(**given: str) -> float | None:
        told = Cadence.from_environ(given, save_s=1.0).explain().ends_in_s
        # The cadence subtracts half of the save time.
        return None if told is None else told + 0.5

    assert ends_in_s() is None
    assert ends_in_s(MIZZEN_ENDS_AT_S="1000003600.5") == pytest.approx(3600.5, abs=0.1)
    assert ends_in_s(SLURM_JOB_END_TIME="1000003600") == pytest.approx(3600 - SLURM_LEAD_S, abs=0.1)
    assert ends_in_s(SLURM_JOB_END_TIME="1000003600", MIZZEN_ENDS_AT_S="1000000900") == pytest.approx(900, abs=0.1)
    for over in ("999999999", "1000000100", "soon", "-5", "0", "nan"):
        assert ends_in_s(SLURM_JOB_END_TIME=over) is None
    assert ends_in_s(MIZZEN_ENDS_AT_S="999999999") is None
    for bad in ("soon", "-5", "inf"):
        with pytest.raises(ValueError, match=r"MIZZEN_ENDS_AT_S=.*: must be a time in seconds since the epoch"):
            Cadence.from_environ({"MIZZEN_ENDS_AT_S": bad})
    assert Cadence.from_environ({"MIZZEN_ENDS_AT_S": "1000000900"}, ends_in_s=50, save_s=1).explain().ends_in_s < 50
    assert mtbf_of_environ({"MIZZEN_ENDS_AT_S": "1000000900"}).mtbf_s == 24 * H


def test_the_lead_is_that_of_the_notice() -> None:
    """The cadence assumes the same lead before Slurm's time limit as the notice has."""
    from mizzen.notices.notice import DEFAULT_LEAD_S

    assert SLURM_LEAD_S == DEFAULT_LEAD_S
