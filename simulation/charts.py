"""The charts of the report: a line or bar for each run, which has the same colour in all charts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isnan, nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from infra.reports.charts import Picture, bars, colours, name_axis, nothing, percentiles, picture, value_ticks
from infra.reports.formats import listed, number, percent
from simulation.difference import DONE, QUOTAS
from simulation.meter import ALL, HOUR_S
from simulation.result import PolicyRow, name_of, until_key
from simulation.settings import LEVELS

_HIGH = (1, 2)
_DAY_H = 24.0
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
_TICKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36000: "10 h", 360000: "100 h"}
_DASH = 4.0
"""Length of one colour's dash in a line that several runs share, in line widths."""
_Hours = Mapping[str, Any]
_Series = Sequence[float | None]


def pictures(outcomes: Sequence[PolicyRow]) -> list[Picture]:
    """Returns all charts of the report."""
    draw = _Charts(outcomes)
    by_quota = [(until, done, quota, title) for quota, title in QUOTAS.items() for until, done in DONE.items()]
    return [
        draw.hourly("GPUs allocated", "GPU hours held divided by GPU hours available, per hour.", "allocated",
                    "allocation_rate", share=True),
        draw.hourly("GPUs allocated while saturated", "Counts a GPU type while more of its slots are requested than "
                    "free.", "allocated", "saturated_allocation_rate", share=True),
        draw.hourly("Load", "GPUs held or requested by queued workloads, divided by supply.", "times supply",
                    "demand_over_supply", line_at=1.0),
        draw.hourly("GPUs available", "Includes the machines of pools.", "GPUs", "available_gpu_hours"),
        *(draw.hourly(f"Not {done} in time, within quota", "Missed divided by judged objectives, all levels, per "
                      "hour.", "missed", partial(_missed, until, LEVELS), share=True) for until, done in DONE.items()),
        *(draw.hourly(f"Not {done} in time, levels 1 and 2", "Within-quota workloads of the two highest levels, per "
                      "hour.", "missed", partial(_missed, until, _HIGH), share=True) for until, done in DONE.items()),
        *(draw.misses(f"Not {done} in time by priority, {title}", until, quota)
          for until, done, quota, title in by_quota),
        *(draw.waits(f"Waits until {done} by priority, {title}", until, quota)
          for until, done, quota, title in by_quota),
        *(draw.hourly(f"P95 wait until {done}, within quota", f"Waits of the workloads {done} in the hour.",
                      *_in_units(outcomes, until)) for until, done in DONE.items()),
        draw.hourly("Preemptions", "Workloads evicted in the hour.", "evictions per hour", "preemptions"),
        draw.hourly("GPU hours lost", "Repeated work, and slots held during evictions and restarts.",
                    "GPU hours per hour", "lost_gpu_hours"),
        draw.losses(),
        draw.single("Workloads finished", "By the end of the run.", "workloads", "finished", number),
        draw.single("Decisions per second", "Workloads offered to the regions per second of wall time.",
                    "decisions / s", "decisions_per_s", partial(number, places=0)),
        draw.single("Negative cache", "Share of bids answered by a cached refusal of the pass.", "hit rate",
                    "negative_cache_hit_rate", partial(percent, places=1)),
    ]  # fmt: skip


def _missed(until: str, levels: Iterable[int], hours: _Hours) -> _Series:
    """Returns the miss rate of several levels together, per hour; None for hours without judged objectives."""
    judged, missed = (
        map(sum, zip(*(hours[until_key(table, until)]["within_quota"][str(n)] for n in levels), strict=True))
        for table in ("objectives_judged", "objectives_missed")
    )
    return [m / j if j else None for m, j in zip(missed, judged, strict=True)]


def _in_units(outcomes: Sequence[PolicyRow], until: str) -> tuple[str, Callable[[_Hours], _Series]]:
    """Returns (unit's name, P95 waits in that unit); the unit suits the longest wait."""

    def waits_s(hours: _Hours) -> _Series:
        found: _Series = hours[until_key("waits", until)]["within_quota"][ALL]["p95"]
        return found

    longest_s = max((wait or 0.0 for one in outcomes if one["hourly"] for wait in waits_s(one["hourly"])), default=0.0)
    unit, unit_s = next(((name, size_s) for name, size_s in _UNITS if longest_s >= 2 * size_s), ("seconds", 1.0))
    return unit, lambda hours: [None if wait is None else wait / unit_s for wait in waits_s(hours)]


class _Charts:
    """Draws charts of the same runs."""

    def __init__(self, outcomes: Sequence[PolicyRow]) -> None:
        self._outcomes = {name_of(one): one for one in outcomes}
        self._colours = colours(self._outcomes)
        self._run = outcomes[0]["run"]
        self._first_h = min(one["run"]["started_s"] for one in outcomes) / HOUR_S
        self._last_h = max(one["run"]["ended_s"] for one in outcomes) / HOUR_S

    def hourly(
        self,
        title: str,
        says: str,
        unit: str,
        of: str | Callable[[_Hours], _Series],
        *,
        share: bool = False,
        line_at: float | None = None,
    ) -> Picture:
        """Draws a figure of each hour, by its key or by a function; runs with equal figures have one line."""
        lines: dict[tuple[tuple[float, ...], tuple[float | None, ...]], list[str]] = {}
        for name, outcome in self._outcomes.items():
            if hours := outcome["hourly"]:
                # The middle of each hour.
                middles = tuple(start_s / HOUR_S + 0.5 for start_s in hours["start_s"])
                lines.setdefault((middles, tuple(hours[of] if isinstance(of, str) else of(hours))), []).append(name)

        def draw(axes: Axes) -> None:
            for index, ((hour, found), names) in enumerate(lines.items()):
                # Each line is thinner than the lines before it, so that lines that coincide in part stay visible.
                width = 1.1 + 1.8 * (len(lines) - 1 - index) / max(1, len(lines) - 1)
                self._line(axes, hour, [nan if value is None else value for value in found], names, width)
            drawn = [value for _, found in lines for value in found if value is not None]
            if not drawn:
                nothing(axes)
            if line_at is not None:
                axes.axhline(line_at, color="#66747f", lw=0.8, ls="--")
            self._time_axis(axes)
            axes.set_ylabel(unit)
            _value_axis(axes, share, max(0.0, min(drawn) - 0.05) if share and drawn and min(drawn) > 0.5 else 0.0)

        equal = [f"{listed(names)} are equal: the line has all colours." for names in lines.values() if len(names) > 1]
        return picture(title, " ".join((says, *equal)), draw)

    def misses(self, title: str, until: str, quota: str) -> Picture:
        """Draws the rate of missed objectives of each priority."""
        judged, rate = until_key("objectives_judged", until), until_key("objective_miss_rate", until)
        levels = [n for n in map(str, LEVELS) if any(one["run"][judged][quota][n] for one in self._outcomes.values())]

        def draw(axes: Axes) -> None:
            width = 0.8 / len(self._outcomes)
            for name, outcome, offset in self._groups():
                rates = [outcome[rate][quota][level] or 0.0 for level in levels]
                at = [k + offset for k in range(len(levels))]
                axes.bar(at, rates, width * 0.9, color=self._colours[name])
            _level_axis(axes, levels)
            axes.set_ylabel("missed")
            _value_axis(axes, share=True)

        return picture(title, "In the measured span; 1 is the highest priority.", draw)

    def waits(self, title: str, until: str, quota: str) -> Picture:
        """Draws the percentiles of the waits of each priority."""
        waits = {name: one[until_key("waits", until)][quota] for name, one in self._outcomes.items()}
        levels = [n for n in map(str, LEVELS) if any(one[n]["p50"] is not None for one in waits.values())]

        def draw(axes: Axes) -> None:
            for name, _, offset in self._groups():
                for k, level in enumerate(levels):
                    found = waits[name][level]
                    if found["p50"] is not None:
                        values = [max(1.0, float(found[p] or 0.0)) for p in ("p50", "p95", "p99")]
                        percentiles(axes, k + offset, values, self._colours[name])
            axes.set_yscale("log")
            top = max(20.0, axes.get_ylim()[1] * 1.5)
            axes.set_ylim(0.8, top)
            axes.set_yticks([at for at in _TICKS if at <= top], [text for at, text in _TICKS.items() if at <= top])
            axes.set_yticks([], minor=True)
            _level_axis(axes, levels)
            axes.set_ylabel("wait (○ P50, – P95, △ P99)")

        return picture(title, "P50, P95 and P99.", draw)

    def losses(self) -> Picture:
        """Draws the GPU hours lost by cause."""

        def draw(axes: Axes) -> None:
            for k, (name, outcome) in enumerate(self._outcomes.items()):
                under = 0.0
                for kind, alpha in (("work", 1.0), ("eviction", 0.6), ("restart", 0.25)):
                    hours = outcome["run"]["lost_gpu_hours_by"][kind]
                    axes.bar(k, hours, 0.6, bottom=under, color=self._colours[name], alpha=alpha)
                    under += hours
            name_axis(axes, list(self._outcomes))
            axes.set_ylabel("GPU hours")
            _value_axis(axes, share=False)

        return picture("GPU hours lost, by cause", "Bottom to top: repeated work, evictions, restarts.", draw)

    def single(self, title: str, says: str, unit: str, key: str, form: Callable[[float], str]) -> Picture:
        """Draws one figure of each run, by its key."""

        def draw(axes: Axes) -> None:
            bars(axes, {name: one[key] or 0 for name, one in self._outcomes.items()}, form)
            axes.set_ylabel(unit)
            if form(0.0).endswith("%"):
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))

        return picture(title, says, draw)

    def _line(
        self, axes: Axes, hour: Sequence[float], values: Sequence[float], names: Sequence[str], width: float
    ) -> None:
        """Draws one line for several runs, with the colours of all of them."""
        # A value without neighbours has no line segment, so it gets a dot.
        around = [nan, *values, nan]
        alone = [isnan(before) and isnan(after) for before, after in zip(around, around[2:], strict=False)]
        dots = [k for k in range(len(values)) if len(hour) <= 4 * _DAY_H or alone[k]]
        for k, name in enumerate(names):
            dash = "-" if len(names) == 1 else (k * _DASH, (_DASH, _DASH * (len(names) - 1)))
            colour, size = self._colours[name], 2.5 + 2 * width - 2.5 * k / len(names)
            axes.plot(hour, values, color=colour, lw=width, ls=dash, dash_capstyle="butt")
            axes.plot([hour[i] for i in dots], [values[i] for i in dots], ".", color=colour, ms=size)

    def _groups(self) -> list[tuple[str, PolicyRow, float]]:
        """Returns (name, run, offset of its bar or line within a group) of each run."""
        count = len(self._outcomes)
        offsets = [0.8 * (k - (count - 1) / 2) / count for k in range(count)]
        return [(name, one, at) for (name, one), at in zip(self._outcomes.items(), offsets, strict=True)]

    def _time_axis(self, axes: Axes) -> None:
        """Sets the limits and the ticks, and shades the measured span, unless it is the whole run."""
        run, span_h = self._run, self._last_h - self._first_h
        axes.set_xlim(self._first_h, max(self._last_h, self._first_h + 1))
        if run["measured_from_s"] > run["started_s"] or run["measured_to_s"] < run["ended_s"]:
            measured_h = run["measured_from_s"] / HOUR_S, run["measured_to_s"] / HOUR_S
            axes.axvspan(*measured_h, color="#fff3c4", zorder=0, lw=0)
        days = span_h > 10 * _DAY_H
        unit_h = _DAY_H if days else 1.0
        first, last = (edge / unit_h for edge in axes.get_xlim())
        ticks = MaxNLocator(6, integer=span_h / unit_h >= 4, steps=[1, 2, 3, 4, 6, 10]).tick_values(first, last)
        shown = [tick for tick in ticks if first <= tick <= last]
        axes.set_xticks([tick * unit_h for tick in shown], [f"{tick:g}" for tick in shown])
        axes.set_xlabel("simulated time, days" if days else "simulated time, hours")


def _value_axis(axes: Axes, share: bool, least: float = 0.0) -> None:
    """Scales the axis from `least` to the largest value, or to a minimum if all values are 0."""
    high = axes.get_ylim()[1]
    if share:
        axes.set_ylim(least, min(1.02, max(high, 0.05)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None if high - least < 0.1 else 0))
    else:
        axes.set_ylim(least, max(high, 1.0))
    value_ticks(axes)


def _level_axis(axes: Axes, levels: Sequence[str]) -> None:
    if not levels:
        nothing(axes)
    axes.set_xticks(range(len(levels)), levels)
    axes.set_xlabel("priority level")
    axes.grid(False, axis="x")
