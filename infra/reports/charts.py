"""Draws charts as SVG with matplotlib, all in one style."""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000", "#882255", "#999933",
)  # fmt: skip
"""Colours of Okabe and Ito, and two of Tol, which are distinct with any colour vision deficiency.

There are ten: enough for five policies, each with and without a change.
"""
INK, ALARM = "#3a4652", "#a01c2c"
_STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8995a1",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e8ee",
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "mizzen",
    "font.family": ["DejaVu Sans", "sans-serif"],
}
_FEW_NAMES = 4
_TIP = "tip: "
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.6g} %")
"""Writes a share as a percentage."""


@dataclass(frozen=True)
class Picture:
    """One chart with its caption."""

    says: str
    svg: str


def colours(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each name."""
    return {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}


def svg(draw: Callable[[Figure], None], size_inches: tuple[float, float]) -> str:
    """Calls `draw` with an empty figure, and returns the figure as an `svg` element."""
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure)
        out = io.StringIO()
        # `savefig` would compute the layout twice: once by itself, and again when it draws.
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    text = out.getvalue()
    return re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", text[text.index("<svg") :])


def tip(text: str) -> str:
    """Returns a `gid` for a matplotlib artist that makes the SVG show `text` as its tooltip."""
    return _TIP + text


def picture(
    title: str, says: str, draw: Callable[[Axes], None], size_inches: tuple[float, float] = (4.5, 2.9)
) -> Picture:
    """Calls `draw` with empty axes, and returns the chart."""

    def whole(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_title(title)
        draw(axes)

    return Picture(says, svg(whole, size_inches))


def panels(charts: Mapping[str, Callable[[Axes], None]], height_inches: float) -> str:
    """Returns charts side by side, two in a row, with their titles and with one legend for all, as an `svg` element."""
    rows = -(-len(charts) // 2)

    def whole(figure: Figure) -> None:
        places = figure.subplots(rows, min(2, len(charts)), squeeze=False).flat
        for axes, (title, draw) in zip(places, charts.items(), strict=False):
            axes.set_title(title)
            draw(axes)
        for axes in places:  # With an odd number of charts, the last cell of the grid is empty.
            axes.remove()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)

    return svg(whole, (10.0, 0.6 + height_inches * rows))


def nothing(axes: Axes) -> None:
    """Writes into empty axes that the run has no values for this chart."""
    axes.text(0.5, 0.5, "none in this run", ha="center", va="center", transform=axes.transAxes, color="#66747f")


def events(axes: Axes, marks: Iterable[tuple[float, str]]) -> None:
    """Writes numbered labels above the axes, each at its position on the horizontal axis."""
    for number, (at, text) in enumerate(marks, 1):
        axes.annotate(
            f"{number} {text}", (at, 1.01), xycoords=("data", "axes fraction"), fontsize=7.0, rotation=25, ha="left",
            va="bottom", color=INK,
        )  # fmt: skip


def percentiles(axes: Axes, at: float, values: Sequence[float], colour: str) -> None:
    """Draws three percentiles as a vertical line with a marker for each."""
    axes.plot([at] * 2, [values[0], values[-1]], color=colour, lw=1.2)
    for value, marker in zip(values, "o_^", strict=True):
        axes.plot(at, value, marker, color=colour, ms=5)


def bars(axes: Axes, values: Mapping[str, float], form: Callable[[float], str]) -> None:
    """Draws a bar with its value for each name, in the colour of the name."""
    for k, (value, colour) in enumerate(zip(values.values(), colours(values).values(), strict=True)):
        axes.bar(k, value, 0.6, color=colour)
        axes.annotate(form(value), (k, value), (0, 1), textcoords="offset points", ha="center", va="bottom", fontsize=8)
    name_axis(axes, list(values))
    axes.margins(y=0.15)
    value_ticks(axes)


def name_axis(axes: Axes, names: Sequence[str]) -> None:
    """Labels the positions 0, 1, 2, ... of the horizontal axis with names."""
    few = len(names) <= _FEW_NAMES
    labels = [name.replace(" (", "\n(") for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=8, rotation=0 if few else 30, ha="center" if few else "right")
    axes.set_xlim(-0.6, max(len(names), 2) - 0.4)
    axes.grid(False, axis="x")


def value_ticks(axes: Axes) -> None:
    """Sets at most six ticks at round values of the vertical axis."""
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
