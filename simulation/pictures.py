"""Draws the charts of the report: small SVGs with a line or bar for each run, which has the same colour in all."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from simulation.difference import DONE, QUOTAS
from simulation.meter import ALL
from simulation.result import until_key
from simulation.settings import LEVELS
from simulation.words import PolicyRow, listed, name_of

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#000000",
    "#882255",
    "#999933",
)
"""Colours of Okabe and Ito, and two of Tol, which are distinct with any colour vision deficiency.

There are ten: enough for five policies, each with and without a change.
"""
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8995a1",
    "axes.labelcolor": "#3a4652",
    "xtick.color": "#3a4652",
    "ytick.color": "#3a4652",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e8ee",
    "svg.fonttype": "none",
    "svg.hashsalt": "mizzen",
    "font.family": ["DejaVu Sans", "sans-serif"],
}
SIZE_INCHES = (4.5, 2.9)
_HIGH = (1, 2)
_DAY_H = 24.0
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
_DASH = 4.0
"""Length of one colour's dash in a line that several runs share, in line widths."""


@dataclass(frozen=True)
class Picture:
    """One chart with its title and caption."""

    title: str
    says: str
    svg: str


def colours(outcomes: Sequence[PolicyRow]) -> dict[str, str]:
    """Returns the colour of each run, by the run's name."""
    return {name_of(one): COLOURS[k % len(COLOURS)] for k, one in enumerate(outcomes)}


def pictures(outcomes: Sequence[PolicyRow]) -> list[Picture]:
    """Returns all charts of the report."""
    return [
        _hourly("GPUs allocated", "GPU hours held divided by GPU hours available, per hour.", "allocated",
                outcomes, lambda h: h["allocation_rate"], percent=True),
        _hourly("GPUs allocated while saturated", "Counts a GPU type while more of its slots are requested than free.",
                "allocated", outcomes, lambda h: h["saturated_allocation_rate"], percent=True),
        _hourly("Load", "GPUs held or requested by queued workloads, divided by supply.", "times supply", outcomes,
                lambda h: h["demand_over_supply"], line_at=1.0),
        _hourly("GPUs available", "Includes the machines of pools.", "GPUs", outcomes,
                lambda h: h["available_gpu_hours"]),
        *(_hourly(f"Not {done} in time, within quota", "Missed divided by judged objectives, all levels, per hour.",
                  "missed", outcomes, partial(_missed, until, LEVELS), percent=True) for until, done in DONE.items()),
        *(_hourly(f"Not {done} in time, levels 1 and 2", "Within-quota workloads of the two highest levels, per hour.",
                  "missed", outcomes, partial(_missed, until, _HIGH), percent=True) for until, done in DONE.items()),
        *(_bars(f"Not {done} in time by priority, {title}", "In the measured span; 1 is the highest priority.",
                outcomes, until, quota) for quota, title in QUOTAS.items() for until, done in DONE.items()),
        *(_waits(f"Waits until {done} by priority, {title}", "P50, P95 and P99.", outcomes, until, quota)
          for quota, title in QUOTAS.items() for until, done in DONE.items()),
        *(_hourly(f"P95 wait until {done}, within quota", f"Waits of the workloads {done} in the hour.",
                  *_in_units(outcomes, until)) for until, done in DONE.items()),
        _hourly("Preemptions", "Workloads evicted in the hour.", "evictions per hour", outcomes,
                lambda h: h["preemptions"]),
        _hourly("GPU hours lost", "Repeated work, and slots held during evictions and restarts.",
                "GPU hours per hour", outcomes, lambda h: h["lost_gpu_hours"]),
        _losses("GPU hours lost, by cause", "Bottom to top: repeated work, evictions, restarts.",
                outcomes),
        _single("Workloads finished", "By the end of the run.", "workloads", outcomes, lambda o: o["finished"]),
        _single("Decisions per second", "Workloads offered to the regions per second of wall time.", "decisions / s",
                outcomes, lambda o: o["decisions_per_s"]),
        _single("Negative cache", "Share of bids answered by a cached refusal of the pass.", "hit rate", outcomes,
                lambda o: o["negative_cache_hit_rate"], percent=True),
    ]  # fmt: skip


def _missed(until: str, levels: Iterable[int], hours: Mapping[str, Any]) -> list[float | None]:
    """Returns the miss rate of several levels together, per hour; None for hours without judged objectives."""
    judged, missed = (
        [
            sum(one)
            for one in zip(*(hours[until_key(table, until)]["within_quota"][str(n)] for n in levels), strict=True)
        ]
        for table in ("objectives_judged", "objectives_missed")
    )
    return [m / j if j else None for m, j in zip(missed, judged, strict=True)]


def picture(
    title: str, says: str, draw: Callable[[Axes], None], size_inches: tuple[float, float] = SIZE_INCHES
) -> Picture:
    """Returns the chart that `draw` draws into empty axes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size_inches, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        draw(axes)
        out = io.StringIO()
        # `savefig` would compute the layout twice: once by itself, and again when it draws.
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    svg = out.getvalue()
    return Picture(title, says, svg[svg.index("<svg") :])


def nothing(axes: Axes) -> None:
    """Writes into the axes that the run has no values for them."""
    axes.text(0.5, 0.5, "none in this run", ha="center", va="center", transform=axes.transAxes, color="#66747f")


def _hourly(
    title: str,
    says: str,
    unit: str,
    outcomes: Sequence[PolicyRow],
    of: Callable[[Mapping[str, Any]], Sequence[float | None]],
    *,
    percent: bool = False,
    line_at: float | None = None,
) -> Picture:
    lines: dict[tuple[tuple[float, ...], tuple[float | None, ...]], list[str]] = {}
    for outcome in outcomes:
        hours = outcome["hourly"]
        if hours:
            # The middle of each hour.
            middles = tuple(start_s / 3600 + 0.5 for start_s in hours["start_s"])
            lines.setdefault((middles, tuple(of(hours))), []).append(name_of(outcome))

    def draw(axes: Axes) -> None:
        drawn: list[float] = []
        for number, ((hour, found), names) in enumerate(lines.items()):
            values = [float("nan") if value is None else value for value in found]
            drawn += [value for value in values if value == value]
            # A value without neighbours has no line segment, so it gets a dot.
            dots = [k for k in range(len(values)) if len(hour) <= 4 * _DAY_H or _alone(values, k)]
            # Each line is thinner than the lines before it, so that lines that coincide in part stay visible.
            width = 1.1 + 1.8 * (len(lines) - 1 - number) / max(1, len(lines) - 1)
            for k, name in enumerate(names):
                dash = "-" if len(names) == 1 else (k * _DASH, (_DASH, _DASH * (len(names) - 1)))
                axes.plot(hour, values, color=colours(outcomes)[name], lw=width, ls=dash, dash_capstyle="butt")
                axes.plot(
                    [hour[i] for i in dots], [values[i] for i in dots], color=colours(outcomes)[name], ls="",
                    marker=".", ms=2.5 + 2 * width - 2.5 * k / len(names),
                )  # fmt: skip
        if not drawn:
            nothing(axes)
        if line_at is not None:
            axes.axhline(line_at, color="#66747f", lw=0.8, ls="--")
        first_h = min(one["run"]["started_s"] for one in outcomes) / 3600
        last_h = max(one["run"]["ended_s"] for one in outcomes) / 3600
        axes.set_xlim(first_h, max(last_h, first_h + 1))
        _shade(axes, outcomes)
        _time_axis(axes, last_h - first_h)
        axes.set_ylabel(unit)
        _value_axis(axes, percent, max(0.0, min(drawn) - 0.05) if percent and drawn and min(drawn) > 0.5 else 0.0)

    equal = [f"{listed(names)} are equal: the line has all colours." for names in lines.values() if len(names) > 1]
    return picture(title, " ".join((says, *equal)), draw)


def _alone(values: Sequence[float], k: int) -> bool:
    """Returns whether the values before and after a value are missing (NaN)."""
    before = values[k - 1] if k else float("nan")
    after = values[k + 1] if k + 1 < len(values) else float("nan")
    return before != before and after != after


def _in_units(
    outcomes: Sequence[PolicyRow], until: str
) -> tuple[str, Sequence[PolicyRow], Callable[[Mapping[str, Any]], Sequence[float | None]]]:
    """Returns (unit's name, runs, P95 waits in that unit); the unit suits the longest wait."""

    def waits_s(hours: Mapping[str, Any]) -> Sequence[float | None]:
        found: Sequence[float | None] = hours[until_key("waits", until)]["within_quota"][ALL]["p95"]
        return found

    longest_s = max((wait or 0.0 for one in outcomes if one["hourly"] for wait in waits_s(one["hourly"])), default=0.0)
    unit, unit_s = next(((name, size_s) for name, size_s in _UNITS if longest_s >= 2 * size_s), ("seconds", 1.0))
    return unit, outcomes, lambda hours: [None if wait is None else wait / unit_s for wait in waits_s(hours)]


def _shade(axes: Axes, outcomes: Sequence[PolicyRow]) -> None:
    """Shades the measured span, unless it is the whole run."""
    run = outcomes[0]["run"]
    first_h, last_h = run["measured_from_s"] / 3600, run["measured_to_s"] / 3600
    if run["measured_from_s"] > run["started_s"] or run["measured_to_s"] < run["ended_s"]:
        axes.axvspan(first_h, last_h, color="#fff3c4", zorder=0, lw=0)


def _time_axis(axes: Axes, span_h: float) -> None:
    days = span_h > 10 * _DAY_H
    unit_h = _DAY_H if days else 1.0
    first, last = (edge / unit_h for edge in axes.get_xlim())
    whole = span_h / unit_h >= 4
    ticks = MaxNLocator(6, integer=whole, steps=[1, 2, 3, 4, 6, 10]).tick_values(first, last)
    shown = [tick for tick in ticks if first <= tick <= last]
    axes.set_xticks([tick * unit_h for tick in shown], [f"{tick:g}" for tick in shown])
    axes.set_xlabel("simulated time, days" if days else "simulated time, hours")


def _value_axis(axes: Axes, percent: bool, least: float = 0.0) -> None:
    """Scales the axis from `least` to the largest value, or to a minimum if all values are 0."""
    high = axes.get_ylim()[1]
    if percent:
        axes.set_ylim(least, min(1.02, max(high, 0.05)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None if high - least < 0.1 else 0))
    else:
        axes.set_ylim(least, max(high, 1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _groups(outcomes: Sequence[PolicyRow]) -> list[tuple[str, str, float, float]]:
    """Returns (name, colour, offset within a group, width) of each run's bar."""
    width = 0.8 / len(outcomes)
    return [
        (name, colour, (k - (len(outcomes) - 1) / 2) * width, width)
        for k, (name, colour) in enumerate(colours(outcomes).items())
    ]


def _bars(title: str, says: str, outcomes: Sequence[PolicyRow], until: str, quota: str) -> Picture:
    judged = until_key("objectives_judged", until)
    levels = [level for level in map(str, LEVELS) if any(o["run"][judged][quota][level] for o in outcomes)]

    def draw(axes: Axes) -> None:
        if not levels:
            nothing(axes)
        for outcome, (_, colour, offset, width) in zip(outcomes, _groups(outcomes), strict=True):
            rates = [outcome[until_key("objective_miss_rate", until)][quota][level] or 0.0 for level in levels]
            axes.bar([k + offset for k in range(len(levels))], rates, width * 0.9, color=colour)
        _level_axis(axes, levels)
        axes.set_ylabel("missed")
        _value_axis(axes, percent=True)

    return picture(title, says, draw)


def _waits(title: str, says: str, outcomes: Sequence[PolicyRow], until: str, quota: str) -> Picture:
    def waited(outcome: PolicyRow, level: str) -> Mapping[str, float | None]:
        found: Mapping[str, float | None] = outcome[until_key("waits", until)][quota][level]
        return found

    levels = [level for level in map(str, LEVELS) if any(waited(o, level)["p50"] is not None for o in outcomes)]

    def draw(axes: Axes) -> None:
        if not levels:
            nothing(axes)
        for outcome, (_, colour, offset, _) in zip(outcomes, _groups(outcomes), strict=True):
            for k, level in enumerate(levels):
                found = waited(outcome, level)
                if found["p50"] is None:
                    continue
                p50, p95, p99 = (max(1.0, float(found[p] or 0.0)) for p in ("p50", "p95", "p99"))
                axes.plot([k + offset] * 2, [p50, p99], color=colour, lw=1.2)
                for value, marker in ((p50, "o"), (p95, "_"), (p99, "^")):
                    axes.plot(k + offset, value, marker, color=colour, ms=4.5)
        axes.set_yscale("log")
        axes.set_ylim(0.8, max(20.0, axes.get_ylim()[1] * 1.5))
        ticks = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36000: "10 h", 360000: "100 h"}
        top = axes.get_ylim()[1]
        shown = {at: label for at, label in ticks.items() if at <= top}
        axes.set_yticks(list(shown), list(shown.values()), minor=False)
        axes.set_yticks([], minor=True)
        _level_axis(axes, levels)
        axes.set_ylabel("wait (○ P50, – P95, △ P99)")

    return picture(title, says, draw)


def _level_axis(axes: Axes, levels: Sequence[str]) -> None:
    axes.set_xticks(range(len(levels)), levels)
    axes.set_xlabel("priority level")
    axes.grid(False, axis="x")


def _losses(title: str, says: str, outcomes: Sequence[PolicyRow]) -> Picture:
    kinds = {"work": 1.0, "eviction": 0.6, "restart": 0.25}

    def draw(axes: Axes) -> None:
        for k, outcome in enumerate(outcomes):
            under = 0.0
            for kind, alpha in kinds.items():
                hours = outcome["run"]["lost_gpu_hours_by"][kind]
                colour = colours(outcomes)[name_of(outcome)]
                axes.bar(k, hours, 0.6, bottom=under, color=colour, alpha=alpha)
                under += hours
        _run_axis(axes, outcomes)
        axes.set_ylabel("GPU hours")
        _value_axis(axes, percent=False)

    return picture(title, says, draw)


def _single(
    title: str,
    says: str,
    unit: str,
    outcomes: Sequence[PolicyRow],
    of: Callable[[PolicyRow], float | None],
    *,
    percent: bool = False,
) -> Picture:
    def draw(axes: Axes) -> None:
        for k, outcome in enumerate(outcomes):
            value = of(outcome) or 0.0
            axes.bar(k, value, 0.6, color=colours(outcomes)[name_of(outcome)])
            text = f"{100 * value:.1f} %" if percent else f"{value:,.0f}"
            axes.annotate(text, (k, value), ha="center", va="bottom", xytext=(0, 1), textcoords="offset points")
        _run_axis(axes, outcomes)
        axes.set_ylabel(unit)
        axes.margins(y=0.15)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))

    return picture(title, says, draw)


def _run_axis(axes: Axes, outcomes: Sequence[PolicyRow]) -> None:
    labels = [name_of(one).replace(" (", "\n(").replace("-", "-\n", 1) for one in outcomes]
    axes.set_xticks(range(len(outcomes)), labels, fontsize=8)
    axes.set_xlim(-0.6, max(len(outcomes), 2) - 0.4)
    axes.grid(False, axis="x")
