"""Expected starts: the schedule of one future, remaining run times, and intervals that past errors correct."""

import json
from dataclasses import replace
from itertools import accumulate
from math import exp
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.starts.calibration import Calibration
from gms.starts.forecast import ArrayElements, HeldAmount, StartForecaster, WaitingDemand
from gms.starts.kernels import RunningColumns, WaitingColumns, list_schedule
from gms.starts.run_history import RunHistory
from reference.list_schedule import ScheduledWorkload, starts_of
from tests.depth import examples

from . import PROPERTY

POOLS = 3
arrays = st.none() | st.integers(0, 1)
masks = st.frozensets(st.integers(0, POOLS - 1), min_size=1)
workloads = st.builds(ScheduledWorkload, masks, st.integers(1, 4), st.integers(1, 9).map(float), st.booleans(), arrays)
ends = st.tuples(st.integers(1, 20).map(float), st.integers(0, POOLS - 1), st.integers(1, 4), arrays)
Running = tuple[float, int, int, int | None]


def _schedule(
    queue: list[tuple[ScheduledWorkload, int]], free: list[int], running: list[Running], admitted: list[int]
) -> list[float]:
    """Returns the start of the first element of each entry, whose elements run for one second more in turn."""
    kinds: dict[tuple[int, int, bool, int | None], int] = {}
    keys = [(sum(1 << pool for pool in w.pools), w.needs, w.reserves, w.array) for w, _ in queue]
    classes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
    allowed, needs, reserves = np.array([kind[:3] for kind in kinds], np.int64).T.copy()
    places = np.array([1000 if kind[3] is None else admitted[kind[3]] for kind in kinds], np.int64)
    of_array = {kind[3]: number for kind, number in kinds.items() if kind[3] is not None}
    held = [(pool, amount, -1 if array is None else of_array.get(array, -1)) for _, pool, amount, array in running]
    pools, holds, counted = np.array(held, np.int64).reshape(-1, 3).T.copy()
    runs_s = np.array([[w.runs_s + turn for w, _ in queue] for turn in (0, 1)])
    starts: list[float] = list_schedule(
        np.array(free, np.int64), RunningColumns(np.array([r[0] for r in running], float), pools, holds, counted),
        WaitingColumns(
            classes, allowed, needs, reserves > 0, places, np.array([count for _, count in queue]),
            np.ones(len(queue), bool), runs_s,
        ), 1e9,
    ).tolist()  # fmt: skip
    return starts


@settings(PROPERTY, max_examples=examples(300))
@given(
    st.lists(st.tuples(workloads, st.integers(1, 3)), min_size=1, max_size=10),
    st.lists(st.integers(0, 3), min_size=POOLS, max_size=POOLS),
    st.lists(ends, max_size=8),
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
)
def test_schedule_equals_the_reference(
    queue: list[tuple[ScheduledWorkload, int]], free: list[int], running: list[Running], admitted: list[int]
) -> None:
    """Each workload, and the first element of each entry, starts when the plain schedule of all elements starts it.

    With reservations and without, and with the throttles of two arrays, whose elements have equal needs.
    """
    first = {w.array: w for w, _ in reversed(queue) if w.array is not None}
    queue = [(replace(first.get(w.array, w), runs_s=w.runs_s), count) for w, count in queue]
    elements = [replace(w, runs_s=w.runs_s + k % 2) for w, count in queue for k in range(count)]
    firsts = [0, *accumulate(count for _, count in queue)][:-1]
    plain = starts_of(elements, free, running, 1e9, dict(enumerate(admitted)))
    assert _schedule(queue, free, running, admitted) == [plain[k] for k in firsts]


def test_remaining_run_times_are_those_above_the_age() -> None:
    """Of run times 1 h and 10 h, only 10 h is left after 2 h; groups without run times use those of the group above."""
    history = RunHistory()
    for ran_s in (3600.0, 36_000.0) * 10:
        history.add(("t/8", "8"), ran_s)
    random = np.random.default_rng(0)
    drawn = history.draw([("t/8", "8"), ("other/8", "8")], np.array([7200.0, 7200.0]), random, 32)
    assert set(drawn.ravel()) == {28_800.0}
    again = RunHistory.from_json(json.loads(json.dumps(history.to_json())))
    fresh = again.draw([("other/8", "8")], np.zeros(1), random, 32)
    assert set(fresh.ravel()) == {3600.0, 36_000.0}


def test_intervals_contain_four_of_five_starts() -> None:
    """Forecasts that err by a constant factor and noise: after some hundreds, 75 to 85 % of starts are within."""
    calibration, random = Calibration(), Random(1)
    inside = []
    for number in range(3000):
        forecast_s = random.uniform(3600.0, 360_000.0)
        waited_s = forecast_s * 3 * exp(random.gauss(0.0, 0.5))
        calibration.set_open(())
        low_s, high_s = calibration.interval((1,), forecast_s)
        if number >= 500:
            inside.append(low_s <= waited_s <= high_s)
        calibration.judge(0, waited_s < low_s)
        calibration.judge(1, waited_s > high_s)
        calibration.learn((1,), forecast_s, waited_s)
        if number == 1500:
            calibration = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert 0.75 <= sum(inside) / len(inside) <= 0.85


def test_workloads_that_still_wait_widen_the_interval() -> None:
    """A hundred starts were on time, but as many workloads already wait ten times as long as forecast."""
    calibration = Calibration()
    for _ in range(100):
        calibration.learn((), 36_000.0, 36_000.0)
    calibration.set_open(())
    on_time = calibration.interval((), 36_000.0)
    calibration.set_open(((), 36_000.0, 360_000.0) for _ in range(100))
    assert on_time == pytest.approx((36_000.0, 36_000.0), abs=300)
    assert calibration.interval((), 36_000.0)[1] > 300_000


def test_a_group_is_drawn_towards_the_group_above_it() -> None:
    """Of 400 starts on time, 200 are of one size, whose others start late: its interval ends between the two."""
    calibration = Calibration()
    for k in range(400):
        calibration.learn((k % 2,), 36_000.0, 36_000.0)
    calibration.set_open(())
    before = calibration.interval((0,), 36_000.0)
    for _ in range(200):
        calibration.learn((0,), 36_000.0, 72_000.0)
        calibration.learn((1,), 36_000.0, 144_000.0)
    calibration.set_open(())
    late, latest = calibration.interval((0,), 36_000.0)[1], calibration.interval((1,), 36_000.0)[1]
    assert before == pytest.approx((36_000.0, 36_000.0), abs=300)
    assert 75_000 < late < 140_000 and latest == pytest.approx(144_000, rel=0.02)


def test_misses_widen_the_interval_and_hits_only_take_that_back() -> None:
    """After ten misses above the interval its end is later; after many starts within it, as it was at first."""
    calibration, random = Calibration(), Random(1)
    for _ in range(1000):
        calibration.learn((), 36_000.0, 36_000.0 * exp(random.gauss(0.0, 1.0)))
    ends = []
    for missed, times in ((False, 100), (True, 10), (False, 1000)):
        for _ in range(times):
            calibration.judge(1, missed)
        calibration.set_open(())
        ends.append(calibration.interval((), 36_000.0))
    first, wider, again = ends
    assert wider[0] == first[0] and wider[1] > 1.2 * first[1] and again == first


@pytest.mark.parametrize(("rank", "reserves", "blocks"), [(3, True, True), (3, False, False), (8, True, False)])
def test_only_a_within_quota_gang_reserves(rank: int, reserves: bool, blocks: bool) -> None:
    """Of four slots, one is free and the others run for long: the gang of four at the head may keep the free one."""
    forecaster = StartForecaster(reserves)
    for _ in range(100):
        forecaster.ended(("t/3", "3"), 360_000.0)
        forecaster.ended(("t/1", "1"), 60.0)
    held = [HeldAmount("running", ("t/3", "3"), 0, 3, 10_000.0)]
    waiting = [
        WaitingDemand("gang", ("t/4", "4"), rank, 3, 4, 1),
        WaitingDemand("small", ("t/1", "1"), rank, 3, 1, 1),
    ]
    small = forecaster.forecast(10_000.0, waiting, held, [1])[1]
    assert bool(small[0] > 3600.0) == blocks


def test_forecast_waits_for_running_work() -> None:
    """Every run takes an hour, and one has run for half of it: the next in the queue is expected in half an hour."""
    forecaster = StartForecaster()
    for _ in range(100):
        forecaster.ended(("t/1", "1"), 3600.0)
    held = [HeldAmount("running", ("t/1", "1"), 0, 1, 8200.0)]
    waiting = [WaitingDemand(f"w{k}", ("t/1", "1"), 3, 3, 1, 1) for k in range(2)]
    waiting.append(WaitingDemand("large", ("t/9", "9"), 3, 3, 9, 1))
    first, second, large = forecaster.forecast(10_000.0, waiting, held, [0]).tolist()
    assert first[0] <= 1800 <= first[1] and second[0] <= 5400 <= second[1]
    assert np.isnan(large).all(), "nine slots never become free"
    assert forecaster.forecast(10_001.0, [], held, [0]).shape == (0, 2)


@pytest.mark.parametrize("throttle", [None, 2])
def test_elements_that_no_scan_ranks_take_freed_slots_first(throttle: int | None) -> None:
    """Two slots, an array with two running and 20 waiting elements of an hour, and a workload behind it.

    The workload starts after the last element. With a third slot, it starts at once if the throttle is two.
    """
    forecaster = StartForecaster()
    for _ in range(100):
        forecaster.ended(("t/1", "1"), 3600.0)
    array = None if throttle is None else "a"
    held = [HeldAmount(f"a-{k}", ("t/1", "1"), 0, 1, 9999.0, array=array) for k in range(2)]
    behind = [WaitingDemand("later", ("t/1", "1"), 3, 3, 1, 1)]
    element = WaitingDemand("a", ("t/1", "1"), 3, 3, 1, 1, array)

    def first_s(slots: int) -> float:
        backlog = ArrayElements(element, 0, 20, None if throttle is None else 0)
        return float(forecaster.forecast(10_000.0, behind, held, [slots - 2], [backlog])[0, 0])

    assert first_s(2) > 3600.0
    assert (first_s(3) == 0.0) == (throttle is not None)
