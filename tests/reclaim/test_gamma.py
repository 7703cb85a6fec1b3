"""Quantiles of the gamma distribution against sums of Poisson probabilities, and the bounds that follow from them."""

from math import erf, exp, fsum, lgamma, log, sqrt

import numpy as np
import pytest

from reclaim.gamma import quantile, quantiles


def at_most(events: int, mean: float) -> float:
    """The probability that a Poisson variable is at most `events`."""
    return fsum(exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(events + 1))


@pytest.mark.parametrize("events", [0, 1, 2, 5, 30, 400, 9000])
@pytest.mark.parametrize("confidence", [0.001, 0.5, 0.8, 0.95, 0.999])
def test_the_quantile_is_the_exact_upper_bound_of_a_count(events: int, confidence: float) -> None:
    """A Poisson variable with the bound as its mean is at most `events` with probability 1 - confidence."""
    bound = quantile(events + 1, confidence)
    assert at_most(events, bound) == pytest.approx(1 - confidence, rel=1e-8)


def test_no_event_in_an_hour() -> None:
    """Without any event the 95% bound is -ln 0.05 divided by the exposure: the rule of three."""
    assert quantile(1, 0.95) == pytest.approx(-log(0.05), rel=1e-12)


@pytest.mark.parametrize("value", [1e-6, 0.1, 1.0, 3.0, 20.0])
def test_shapes_that_are_no_whole_numbers(value: float) -> None:
    """P(1/2, x) is erf(sqrt(x)), and the recurrence gives P(3/2, x)."""
    half = erf(sqrt(value))
    assert quantile(0.5, half) == pytest.approx(value, rel=1e-6)
    assert quantile(1.5, half - sqrt(value) * exp(-value) / (sqrt(np.pi) / 2)) == pytest.approx(value, rel=1e-6)


def test_many_shapes_at_once() -> None:
    shapes = np.array([[1.0, 2.5], [2.5, 1e7]])
    found = quantiles(shapes, 0.9)
    assert found[0, 1] == found[1, 0] == quantile(2.5, 0.9) and found[0, 0] == pytest.approx(-log(0.1))
    assert found[1, 1] == pytest.approx(1e7 + 1.2815515655 * sqrt(1e7), rel=1e-6)
    assert quantiles(np.zeros(0), 0.9).size == 0


@pytest.mark.parametrize(("shape", "probability"), [(0.0, 0.5), (1.0, 0.0), (1.0, 1.0), (float("nan"), 0.5)])
def test_bad_arguments_are_named(shape: float, probability: float) -> None:
    with pytest.raises(ValueError, match=r"shape: |probability: "):
        quantile(shape, probability)
