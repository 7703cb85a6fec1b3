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
from gms.starts.kernels import FreeMachines, RunningColumns, WaitingColumns, list_schedule
from gms.starts.run_history import RunHistory
from reference.list_schedule import Running, ScheduledWorkload, starts_of
from tests.depth import examples

from . import PROPERTY

POOLS = 3
PLAIN = 2
"""The pool without machines."""
arrays = st.none() | st.integers(0, 1)
masks = st.frozensets(st.integers(0, POOLS - 2), min_size=1)
runs = st.integers(1, 9).map(float)
with_machines = st.builds(
    ScheduledWorkload, masks, st.integers(1, 9), runs, st.booleans(), arrays, size=st.integers(1, 4)
)
without = st.builds(ScheduledWorkload, st.just(frozenset({PLAIN})), st.integers(1, 4), runs, st.booleans(), arrays)
workloads = with_machines | without
machines = st.lists(st.tuples(st.integers(0, POOLS - 2), st.integers(0, 4)), max_size=6)
parts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=3)
ends = st.tuples(st.integers(1, 20).map(float), st.integers(0, POOLS - 1), st.integers(1, 4), arrays, parts)


def _schedule(
    queue: list[tuple[ScheduledWorkload, int]], free: list[int], running: list[Running], admitted: list[int],
    machines: list[tuple[int, int]],
) -> list[float]:  # fmt: skip
    """Returns the start of the first element of each entry, whose elements run for one second more in turn."""
    kinds: dict[tuple[int, int, int, bool, int | None], int] = {}
    keys = [(sum(1 << pool for pool in w.pools), w.needs, w.size, w.reserves, w.array) for w, _ in queue]
    classes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
    allowed, needs, sizes, reserves = np.array([kind[:4] for kind in kinds], np.int64).T.copy()
    places = np.array([1000 if kind[4] is None else admitted[kind[4]] for kind in kinds], np.int64)
    of_array = {kind[4]: number for kind, number in kinds.items() if kind[4] is not None}
    held = [(pool, amount, -1 if array is None else of_array.get(array, -1)) for _, pool, amount, array, _ in running]
    pools, holds, counted = np.array(held, np.int64).reshape(-1, 3).T.copy()
    first = np.array([0, *accumulate(len(end[4]) for end in running)], np.int64)
    on, gpus = np.array([part for end in running for part in end[4]], np.int64).reshape(-1, 2).T.copy()
    runs_s = np.array([[w.runs_s + turn for w, _ in queue] for turn in (0, 1)])
    starts: list[float] = list_schedule(
        np.array(free, np.int64), FreeMachines(*np.array(machines, np.int64).reshape(-1, 2).T.copy()),
        RunningColumns(np.array([r[0] for r in running], float), pools, holds, counted, first, on, gpus),
        WaitingColumns(
            classes, allowed, needs, sizes, reserves > 0, places, np.array([count for _, count in queue]),
            np.ones(len(queue), bool), runs_s,
        ), 1e9,
    ).tolist()  # fmt: skip
    return starts


@settings(PROPERTY, max_examples=examples(300))
@given(
    st.lists(st.tuples(workloads, st.integers(1, 3)), min_size=1, max_size=10),
    st.integers(0, 3),
    machines,
    st.lists(ends, max_size=8),
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
)
def test_schedule_equals_the_reference(
    queue: list[tuple[ScheduledWorkload, int]], plain_free: int, machines: list[tuple[int, int]],
    running: list[Running], admitted: list[int],
) -> None:  # fmt: skip
    """Each workload, and the first element of each entry, starts when the plain schedule of all elements starts it.

    With reservations and without, on machines and without, and with the throttles of two arrays, whose elements have
    equal needs. All ends are different, because the order of equal ones decides which machines become free first.
    """
    first: dict[int | None, ScheduledWorkload] = {w.array: w for w, _ in reversed(queue) if w.array is not None}
    queue = [
        (replace(first.get(w.array, w), runs_s=w.runs_s + 2.0 ** (-2 - k)), count) for k, (w, count) in enumerate(queue)
    ]
    elements = [replace(w, runs_s=w.runs_s + k % 2) for w, count in queue for k in range(count)]
    firsts = [0, *accumulate(count for _, count in queue)][:-1]
    running = [_on_machines(k, end, machines) for k, end in enumerate(running)]
    free = [sum(gpus for p, gpus in machines if p == pool) for pool in range(PLAIN)] + [plain_free]
    plain = starts_of(elements, free, running, 1e9, dict(enumerate(admitted)), machines)
    assert _schedule(queue, free, running, admitted, machines) == [plain[k] for k in firsts]


def _on_machines(k: int, end: Running, machines: list[tuple[int, int]]) -> Running:
    """Returns a running workload whose parts are on machines of its pool; without any it holds nothing there."""
    at_s, pool, amount, array, parts = end
    at_s += 2.0 ** (-20 - k)
    if pool == PLAIN:
        return at_s, pool, amount, array, ()
    own = [(m, gpus) for m, gpus in parts if m < len(machines) and machines[m][0] == pool]
    return at_s, pool, sum(gpus for _, gpus in own), array, own


def test_a_longer_queue_is_not_compiled_again() -> None:
    """The schedule has one set of argument types, which an installation compiles in advance, however many wait."""
    for waiting in (1, 3):
        demands = [WaitingDemand(f"w{k}", ("t", "1"), 1, 1, 1, 1) for k in range(waiting)]
        StartForecaster().forecast(1.0, demands, [HeldAmount("v", ("t", "1"), 0, 1, 0.0)], [1])
    assert len(list_schedule.signatures) == 1  # type: ignore[attr-defined]


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


def test_free_gpus_on_several_machines_do_not_fit_a_task() -> None:
    """Two machines with four free GPUs each, beside runs of ten hours: a task of eight GPUs does not start at once.

    Two tasks of four GPUs are.
    """
    forecaster = StartForecaster()
    for _ in range(100):
        forecaster.ended(("t/4", "4"), 36_000.0)
    held = [HeldAmount(f"r{m}", ("t/4", "4"), 0, 4, 9999.0, on=((m, 4),)) for m in range(2)]
    machines = FreeMachines(np.zeros(2, np.int64), np.full(2, 4))

    def first_s(size: int) -> float:
        waiting = [WaitingDemand("w", ("t/8", "8"), 3, 3, 8, 1, size=size)]
        return float(forecaster.forecast(10_000.0, waiting, held, [8], machines=machines)[0, 0])

    assert first_s(8) > 0.0 and first_s(4) == 0.0
