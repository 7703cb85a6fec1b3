"""Values over time as curves: the prices of clusters, and the steps of a workload."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from api.workloads.views import PointView

WIDTH, HEIGHT = 1000, 120
"""Size of a chart in its own units."""


@dataclass(frozen=True)
class Curve:
    """One curve. `number` selects its colour."""

    label: str
    number: int
    points: str
    """The points of an SVG `polyline`."""
    last: float


@dataclass(frozen=True)
class CurveChart:
    """Curves from `begin` to `end`, with values from `bottom` (0, or the least value if it is negative) to `top`."""

    begin: datetime
    end: datetime
    bottom: float
    top: float
    curves: list[Curve]


def chart_of(
    series: Mapping[str, Sequence[tuple[datetime, float]]], begin: datetime, end: datetime, *, is_stepped: bool
) -> CurveChart | None:
    """Returns a chart of values, sorted by time; None: there are none.

    `is_stepped`: a value holds until the next one, and the last until `end`. A value before `begin` holds at `begin`.
    """
    whole_s = max(1.0, (end - begin).total_seconds())
    found = [value for values in series.values() for _, value in values]
    bottom, top = min([*found, 0.0]), max([*found, 0.0])
    span = top - bottom or 1.0

    def place(at: datetime, value: float) -> str:
        x = WIDTH * min(1.0, max(0.0, (at - begin).total_seconds() / whole_s))
        return f"{x:.1f},{HEIGHT - HEIGHT * (value - bottom) / span:.1f}"

    curves = []
    for number, (label, values) in enumerate(series.items()):
        points: list[str] = []
        for index, (at, value) in enumerate(values):
            points.append(place(at, value))
            if is_stepped:
                following = values[index + 1][0] if index + 1 < len(values) else end
                points.append(place(following, value))
        if points:
            curves.append(Curve(label, number % 8, " ".join(points), values[-1][1]))
    return CurveChart(begin.astimezone(UTC), end.astimezone(UTC), bottom, bottom + span, curves) if curves else None


def progress_charts(points: Sequence[PointView], begin: datetime, end: datetime) -> list[tuple[str, CurveChart]]:
    """Returns the charts of a workload's steps and of each of its metrics, with a curve for each attempt."""
    metrics = sorted({name for point in points for name in point.metrics})
    charts = [("steps", _by_attempt((p, float(p.step)) for p in points))]
    charts += [(name, _by_attempt((p, p.metrics[name]) for p in points if name in p.metrics)) for name in metrics]
    drawn = [(label, chart_of(series, begin, end, is_stepped=False)) for label, series in charts]
    return [(label, chart) for label, chart in drawn if chart is not None]


def _by_attempt(values: Iterable[tuple[PointView, float]]) -> dict[str, list[tuple[datetime, float]]]:
    found: dict[str, list[tuple[datetime, float]]] = {}
    for point, value in values:
        found.setdefault(f"attempt {point.attempt}", []).append((point.at, value))
    return found
