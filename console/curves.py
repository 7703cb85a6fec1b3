"""Values over time as curves: the prices of clusters, and the steps of a workload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

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
    """Curves from `begin` to `end`, with values from 0 to `top`."""

    begin: datetime
    end: datetime
    top: float
    curves: list[Curve]


def chart_of(
    series: Mapping[str, Sequence[tuple[datetime, float]]], begin: datetime, end: datetime, *, is_stepped: bool
) -> CurveChart | None:
    """Returns a chart of values, sorted by time; None: there are none.

    `is_stepped`: a value holds until the next one, and the last until `end`. A value before `begin` holds at `begin`.
    """
    whole_s = max(1.0, (end - begin).total_seconds())
    top = max((value for values in series.values() for _, value in values), default=0.0) or 1.0

    def place(at: datetime, value: float) -> str:
        x = WIDTH * min(1.0, max(0.0, (at - begin).total_seconds() / whole_s))
        return f"{x:.1f},{HEIGHT - HEIGHT * value / top:.1f}"

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
    return CurveChart(begin.astimezone(UTC), end.astimezone(UTC), top, curves) if curves else None
