"""Curves of steps and metrics: bounded, and evenly spaced however long they are."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from domain.progress_curve import POINTS_KEPT, Point, with_point


def _curve(steps: list[int]) -> list[Point]:
    points: list[Point] = []
    for number, step in enumerate(steps):
        points = with_point(points, Point(step, float(number), {}))
    return points


@given(st.lists(st.integers(min_value=0, max_value=1 << 40), max_size=900))
def test_a_curve_is_bounded_and_has_its_ends(steps: list[int]) -> None:
    """Its steps rise; the first one is there, and the last one is close to the highest one."""
    found = [point.step for point in _curve(steps)]
    assert len(found) <= POINTS_KEPT and found == sorted(set(found)) and found[:1] == steps[:1]
    assert not steps or max(steps) - found[-1] < max(1.0, (max(steps) - found[0]) / POINTS_KEPT)


@given(st.integers(min_value=1, max_value=8000), st.integers(min_value=1, max_value=1000))
def test_points_are_evenly_spaced(reports: int, each: int) -> None:
    """Of reports at regular steps, no gap is wider than a fiftieth of the curve, or the steps between two reports."""
    found = [point.step for point in _curve([number * each for number in range(reports)])]
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert max(gaps, default=0) <= max(each, 4 * found[-1] / POINTS_KEPT)
    assert len(found) >= min(reports, POINTS_KEPT // 4)


def test_a_long_curve_changes_rarely() -> None:
    """Of 100,000 reports, those that change what is stored are few: each change writes the whole curve."""
    points, changes = [Point(0, 0.0, {})], 0
    for step in range(1, 100_000):
        longer = with_point(points, Point(step, 0.0, {}))
        changes += longer != points
        points = longer
    assert changes < 10 * POINTS_KEPT
