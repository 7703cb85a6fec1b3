"""The steps and metrics that an attempt has reported over time, as a bounded curve."""

from collections.abc import Sequence
from typing import NamedTuple

POINTS_KEPT = 200
"""Maximum number of points of a curve."""


class Point(NamedTuple):
    """The values that a task had reported at one time."""

    step: int
    at_s: float
    """When the report was read, in seconds since the epoch."""
    metrics: dict[str, float]
    """Values by name, such as the loss."""


def with_point(points: Sequence[Point], point: Point) -> list[Point]:
    """Returns the curve with the point added, or unchanged if the point is too close to the last one.

    The result has at most `POINTS_KEPT` points, evenly spaced by step within a factor of about two, however long the
    curve is, and the first point always stays. So the longer an attempt runs, the more rarely its curve changes.
    """
    kept = list(points)
    spacing = (point.step - kept[0].step) / POINTS_KEPT if kept else 0.0
    if kept and point.step - kept[-1].step < max(1.0, spacing):
        return kept
    kept.append(point)
    return kept if len(kept) <= POINTS_KEPT else _thinned(kept, 2 * spacing)


def _thinned(points: Sequence[Point], spacing: float) -> list[Point]:
    kept = [points[0]]
    for point in points[1:-1]:
        if point.step - kept[-1].step >= spacing:
            kept.append(point)
    return [*kept, points[-1]]
