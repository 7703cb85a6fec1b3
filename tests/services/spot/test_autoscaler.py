"""The autoscaler: hysteresis in both directions, limits, and its state as JSON."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from services.spot.autoscaler import LoadAutoscaler, ScalingState

_STATE = TypeAdapter(ScalingState)

_STEPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), max_size=60)


@given(_STEPS, st.integers(0, 120), st.integers(0, 120))
def test_the_target_changes_only_after_its_delay(steps: list[tuple[int, int]], up_s: int, down_s: int) -> None:
    """The target changes only to a candidate on whose side all candidates have been for the whole delay."""
    scaler = LoadAutoscaler(1.0, least=1, most=5, window_s=60.0, upscale_delay_s=up_s, downscale_delay_s=down_s)
    state, now_s = scaler.start(), 0.0
    history: list[tuple[float, int]] = []
    candidates: list[tuple[float, int]] = []
    for gap_s, requests in steps:
        now_s += gap_s
        history.append((now_s, requests))
        arrived = sum(count for at_s, count in history if at_s > now_s - 60)
        candidates.append((now_s, min(5, max(1, -(-arrived // 60)))))
        before = state.target
        state = scaler.decide(_STATE.validate_json(_STATE.dump_json(state)), now_s, requests)
        side = [(at_s, one) for at_s, one in reversed(candidates)]
        sign = (candidates[-1][1] > before) - (candidates[-1][1] < before)
        run = []
        for at_s, one in side:
            if (one > before) - (one < before) != sign:
                break
            run.append(at_s)
        due = sign != 0 and now_s - run[-1] >= (up_s if sign > 0 else down_s)
        assert state.target == (candidates[-1][1] if due else before)
        if due:
            candidates.clear()


def test_a_short_burst_changes_nothing() -> None:
    """A burst of nine minutes is ignored, and a load of ten minutes is followed, up and down."""
    scaler = LoadAutoscaler(1.0)
    state = scaler.start()
    for k in range(55):
        state = scaler.decide(state, 10.0 * k, 50)
    assert state.target == 1
    state = scaler.decide(state, 620.0, 0)
    assert state.above_since_s is None
    for k in range(63, 130):
        state = scaler.decide(state, 10.0 * k, 50)
    assert state.target == 5
    for k in range(130, 200):
        state = scaler.decide(state, 10.0 * k, 0)
    assert state.target == 1


def test_one_request_wakes_from_zero_at_once() -> None:
    """Whether it was counted or waits in a balancer. It keeps one replica until the downscale delay is over."""
    scaler = LoadAutoscaler(2.0, least=0, most=3, upscale_delay_s=300.0, downscale_delay_s=1200.0)
    asleep = scaler.start()
    assert asleep.target == scaler.decide(asleep, 0.0, 0).target == 0
    assert scaler.decide(asleep, 0.0, 1).target == 1
    awake = scaler.decide(asleep, 0.0, 0, waiting=1)
    assert awake.target == 1
    for k in range(400):  # A cold start of more than an hour, for which the client waits.
        awake = scaler.decide(awake, 10.0 * k, 0, waiting=1)
    assert awake.target == 1
    for k in range(400, 521):
        assert awake.target == 1
        awake = scaler.decide(awake, 10.0 * k, 0)
    assert awake.target == 0
    assert LoadAutoscaler(1.0, least=0, most=0).decide(ScalingState(0), 0.0, 5, waiting=5).target == 0


def test_requests_in_progress_are_load() -> None:
    """Long streams need replicas although few requests arrive, and a single one keeps the last replica."""
    scaler = LoadAutoscaler(math.inf, least=0, most=8, upscale_delay_s=30.0, downscale_delay_s=30.0, ongoing=4.0)
    state = scaler.start()
    for k in range(30):
        state = scaler.decide(_STATE.validate_json(_STATE.dump_json(state)), 5.0 * k, 0, ongoing=20)
    assert state.target == 5
    for k in range(30, 120):
        state = scaler.decide(state, 5.0 * k, 0, ongoing=1)
    assert state.target == 1
    by_rate = LoadAutoscaler(1.0, least=0, most=8, upscale_delay_s=30.0, downscale_delay_s=30.0)
    state = by_rate.decide(by_rate.start(), 0.0, 1)
    for k in range(1, 100):
        state = by_rate.decide(state, 5.0 * k, 0, ongoing=1)
    assert state.target == 1 and state.ongoing == ()
    for k in range(100, 120):
        state = by_rate.decide(state, 5.0 * k, 0)
    assert state.target == 0


def test_fixed_target_and_limits() -> None:
    """A fixed target ignores the load; settings that make no sense are refused by name."""
    fixed = LoadAutoscaler(1.0, least=3, most=3, upscale_delay_s=0.0)
    assert fixed.decide(fixed.start(), 1.0, 10**6).target == 3
    for wrong in (
        {"requests_per_s": 0},
        {"requests_per_s": 1, "least": 3, "most": 2},
        {"requests_per_s": 1, "window_s": 0},
    ):
        with pytest.raises(ValueError, match="must be"):
            LoadAutoscaler(**wrong)


def test_replicas_of_different_machines_count_with_their_own_rates() -> None:
    """The replicas that exist count first, in their order; further ones have the rate of the fastest."""
    scaler = LoadAutoscaler(2.5, least=0, most=6, window_s=60.0)
    for requests, rates, wanted in (
        (150, (), 1),
        (150, (1.25,), 2),
        (150, (2.5, 1.25), 1),
        (151, (2.5, 1.25), 2),
        (375, (1.25, 1.25), 4),
        (18, (0.1, 0.1, 0.1), 3),
        (0, (2.5, 1.25), 0),
    ):
        assert scaler.candidate(requests, rates) == wanted
    assert scaler.decide(ScalingState(0), 60.0, 150, rates=(1.25,)).target == 2


def test_reported_loads_decide_the_target() -> None:
    """The target follows the mean of the reported load over the window, and the requests if they need more replicas."""
    scaler = LoadAutoscaler(1.0, most=9, upscale_delay_s=0.0, downscale_delay_s=0.0, load=100.0)
    state = scaler.decide(scaler.start(), 0.0, 0, load=250.0)
    assert state.target == 3
    state = scaler.decide(_STATE.validate_json(_STATE.dump_json(state)), 30.0, 0, load=50.0)
    assert state.target == 2
    assert scaler.decide(state, 59.0, 400, load=50.0).target == 7
    assert scaler.decide(state, 120.0, 0).target == 1
    assert LoadAutoscaler(1.0, most=9, upscale_delay_s=0.0).decide(state, 120.0, 0, load=900.0).loads == ()
