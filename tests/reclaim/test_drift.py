"""The drift detector: its delays and false alarms, and what the published counts allow."""

from math import exp

import numpy as np
import pytest

from reclaim.drift import DriftSettings, DriftState, watch
from research.reclaim.drift_delay import delay, within

PER_H = 847 * 0.42 / (60 * 24)
"""Emergency departures of the site in the published measurement."""


def stepwise(settings: DriftSettings, shift: float, draw: np.random.Generator, step: float) -> float:
    """Expected events until the alarm, with counts of short periods."""
    state, passed = DriftState(), 0.0
    while True:
        passed += step
        state, alarm = watch(state, settings, int(draw.poisson(shift * step)), step, passed)
        if alarm is not None:
            return passed


@pytest.mark.parametrize("shift", [1 / 3, 1.0, 3.0])
def test_the_delay_equals_that_of_short_periods(shift: float) -> None:
    settings = DriftSettings(1.5, 2.0)
    draw = np.random.default_rng(1)
    plain = np.mean([stepwise(settings, shift, draw, 0.05) for _ in range(200)])
    assert delay(settings, shift).expected_events == pytest.approx(plain, rel=0.2)


def test_larger_changes_are_noticed_sooner_and_a_high_threshold_later() -> None:
    found = [delay(DriftSettings(), shift).expected_events for shift in (1.0, 1.3, 1.7, 3.0, 6.0)]
    assert found == sorted(found, reverse=True) and found[0] > 10 * found[2]
    assert delay(DriftSettings(threshold=3.0), 1.7).expected_events < found[2]


def test_an_alarm_names_the_change() -> None:
    """100 periods with one event each as expected, then three each: the change is found where it was."""
    state, at_s = DriftState.start(0.0), 0.0
    for count in [1] * 100 + [3] * 50:
        at_s += 60
        state, alarm = watch(state, DriftSettings(), count, 1.0, at_s)
        if alarm is not None:
            break
    assert alarm is not None and alarm.since_s == 6000 and alarm.at_s == at_s
    assert alarm.events == 3 * alarm.expected == 3 * (at_s - 6000) / 60
    assert state == DriftState.start(at_s)
    assert DriftState.from_json(state.to_json()) == state


def test_dispersion_raises_the_evidence_that_is_needed() -> None:
    once, _ = watch(DriftState(), DriftSettings(), 5, 1.0, 60.0)
    weak, _ = watch(DriftState(), DriftSettings(), 5, 1.0, 60.0, 4.0)
    assert once.more.score == pytest.approx(4 * weak.more.score)


def test_eighteen_minutes_do_not_follow_from_the_published_counts() -> None:
    """At 1.7 times the rate, 18 minutes have 0.13 departures on average, none at all in 88% of cases."""
    mean = 1.7 * PER_H * 0.3
    assert mean == pytest.approx(0.126, abs=5e-4) and exp(-mean) == pytest.approx(0.88, abs=2e-3)
    # An error of at most 10% with 90% probability needs about 270 departures: 27 days at this rate.
    assert within(0.1, 250) < 0.9 < within(0.1, 280)
    days = 270 / (1.7 * PER_H) / 24
    assert days == pytest.approx(27, abs=1)
    # No detector with few false alarms is that fast: days, not minutes.
    assert delay(DriftSettings(), 1.7).hours(PER_H) > 48


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"ratio: 1.0: must be above 1"):
        DriftSettings(ratio=1.0)
    with pytest.raises(ValueError, match=r"threshold: 0.0: must be above 0"):
        DriftSettings(threshold=0.0)
