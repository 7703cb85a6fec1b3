"""Values over time as curves: the prices of clusters, the steps of a workload, the requests of a service."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from api.services.traffic import TrafficMinute
from api.workloads.views import PointView

WIDTH, HEIGHT = 1000, 120
"""Size of a chart in its own units."""

_TRAFFIC = (
    ("Requests, as a mean of each minute", "/s", {"all": "per_s", "failed or cut": "failed_per_s"}),
    ("Time to the last byte, as a mean of each minute", " s", {"median": "p50_s", "99th percentile": "p99_s"}),
)
"""Label, unit, and names and fields of the curves of each chart of a service."""


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


def traffic_charts(minutes: Sequence[TrafficMinute]) -> list[tuple[str, str, CurveChart]]:
    """Returns the charts of a service's requests and of their time, each with its unit."""
    if len(minutes) < 2:
        return []
    begin, end = minutes[0].at, minutes[-1].at
    found = []
    for label, unit, names in _TRAFFIC:
        series = {
            name: [(one.at, value) for one in minutes if (value := getattr(one, field)) is not None]
            for name, field in names.items()
        }
        if (chart := chart_of(series, begin, end, is_stepped=False)) is not None:
            found.append((label, unit, chart))
    return found


def _by_attempt(values: Iterable[tuple[PointView, float]]) -> dict[str, list[tuple[datetime, float]]]:
    found: dict[str, list[tuple[datetime, float]]] = {}
    for point, value in values:
        found.setdefault(f"attempt {point.attempt}", []).append((point.at, value))
    return found
