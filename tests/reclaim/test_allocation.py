"""Theorem 1 and Lemma 2 against numeric optimisation and against the plain iteration."""

from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.allocation import water_fill, water_fill_links
from tests.reclaim.reference import best_cost, iterated, least, rate_of_cost

HAZARD = st.floats(-6, 3).map(lambda x: 10**x)
BYTES = st.floats(3, 13).map(lambda x: 10**x)
SPEED = st.floats(3, 11).map(lambda x: 10**x)


def cost(hazard: np.ndarray, size: np.ndarray, share: np.ndarray) -> float:
    return float(np.sqrt(2 * hazard * size / share).sum())


@given(st.lists(st.tuples(HAZARD, BYTES), min_size=1, max_size=5), SPEED)
def test_theorem_1_is_the_numeric_minimum(jobs: list[tuple[float, float]], budget: float) -> None:
    """The cube-root allocation costs as much as the best that exchanges find, and as Theorem 1 states."""
    hazard, size = (np.array(one) for one in zip(*jobs, strict=True))
    share = water_fill(hazard, size, inf, budget)
    assert share.sum() == pytest.approx(budget, rel=1e-12)
    found = cost(hazard, size, share)
    assert found == pytest.approx(best_cost(list(hazard * size), [inf] * len(jobs), budget), rel=1e-6)
    assert found == pytest.approx(sqrt(2 / budget) * np.cbrt(hazard * size).sum() ** 1.5, rel=1e-9)


@given(HAZARD, BYTES, SPEED)
def test_the_best_interval_of_a_share_is_equation_5(hazard: float, size: float, share: float) -> None:
    """The minimum over the interval, at a fixed bandwidth, is at sqrt(2 C / (lambda b))."""
    exact = sqrt(2 * size / (hazard / 3600 * share))
    found = least(lambda interval: rate_of_cost(hazard, size, share, interval), exact / 1e3, exact * 1e3)
    price = rate_of_cost(hazard, size, share, exact)
    assert price == pytest.approx(rate_of_cost(hazard, size, share, found), rel=1e-12)
    assert price == pytest.approx(sqrt(2 * hazard / 3600 * size / share), rel=1e-12)


@given(st.lists(st.tuples(HAZARD, BYTES, SPEED), min_size=1, max_size=5), st.floats(0.01, 3))
def test_lemma_2_is_the_numeric_minimum(jobs: list[tuple[float, float, float]], part: float) -> None:
    hazard, size, cap = (np.array(one) for one in zip(*jobs, strict=True))
    budget = part * float(cap.sum())
    share = water_fill(hazard, size, cap, budget)
    assert (share <= cap).all() and share.sum() <= budget * (1 + 1e-12)
    assert cost(hazard, size, share) == pytest.approx(best_cost(list(hazard * size), list(cap), budget), rel=1e-6)


@given(
    st.lists(st.tuples(HAZARD, BYTES, st.one_of(SPEED, st.just(inf))), min_size=1, max_size=60),
    SPEED,
)
def test_the_sorted_form_equals_the_iteration(jobs: list[tuple[float, float, float]], budget: float) -> None:
    """One sort gives what the rounds of Lemma 2 give."""
    hazard, size, cap = (np.array(one) for one in zip(*jobs, strict=True))
    plain = iterated(list(np.cbrt(hazard) * np.cbrt(size)), list(cap), budget)
    assert water_fill(hazard, size, cap, budget) == pytest.approx(plain, rel=1e-6, abs=budget * 1e-12)


def test_jobs_without_hazard_or_payload_get_nothing() -> None:
    assert list(water_fill(np.array([0.0, 1.0, 1.0]), [1e9, 0.0, 1e9], inf, 100.0)) == [0, 0, 100]
    assert list(water_fill(np.array([0.0, 1.0]), 1e9, 30.0, 100.0)) == [0, 30]


def test_all_jobs_without_hazard_share_equally() -> None:
    assert list(water_fill(np.zeros(3), 1e9, [10.0, inf, inf], 100.0)) == [10, 45, 45]


def test_no_jobs_and_no_budget() -> None:
    assert len(water_fill(np.zeros(0), np.zeros(0), inf, 5.0)) == 0
    assert list(water_fill(np.ones(2), 1e9, inf, 0.0)) == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, -1.0], 1e9, 1.0, 1.0), r"hazard_per_h\[1\]: -1.0: must be 0 or more and finite"),
        (([1.0, 1.0], [1.0, np.nan], 1.0, 1.0), r"checkpoint_bytes\[1\]: nan: must be 0 or more"),
        (([1.0, 1.0], 1e9, 0.0, 1.0), r"cap_bytes_s: 0.0: must be above 0"),
        (([1.0, 1.0], 1e9, 1.0, inf), r"budget_bytes_s: inf: must be 0 or more and finite"),
        (([1.0, 1.0], [1.0], 1.0, 1.0), r"checkpoint_bytes: has the shape \(1,\): must be one number or 2 numbers"),
    ],
)
def test_bad_numbers_are_named(arguments: tuple[list[float], float, float, float], words: str) -> None:
    hazard, size, cap, budget = arguments
    with pytest.raises(ValueError, match=words):
        water_fill(np.array(hazard), size, cap, budget)


@given(
    st.lists(st.tuples(st.one_of(HAZARD, st.just(0.0)), BYTES, SPEED, st.integers(0, 4)), max_size=30),
    st.lists(st.one_of(SPEED, st.just(0.0)), min_size=5, max_size=5),
)
def test_links_are_divided_each_by_itself(jobs: list[tuple[float, float, float, int]], budgets: list[float]) -> None:
    table = np.array(jobs, dtype=float).reshape(-1, 4)
    hazard, size, cap, link = table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(np.int64)
    found = water_fill_links(hazard, size, cap, np.array(budgets), link)
    for one, budget in enumerate(budgets):
        at = link == one
        assert found[at] == pytest.approx(water_fill(hazard[at], size[at], cap[at], budget), rel=1e-12)


def test_a_link_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"link\[1\]: 2: must be from 0 to 1"):
        water_fill_links(np.ones(2), 1e9, inf, np.ones(2), np.array([0, 2]))
