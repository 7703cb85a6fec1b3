"""Draws the charts of the report of `mizzen spot replay`."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from domain.capacity import CapacityKind
from research.spot.replay import ReplicaSpan
from research.spot.runs import CaseResult, OptimumResult
from research.spot.sweeps import SweepResult
from research.spot.windows import Mean
from simulation.pictures import COLOURS, Picture, picture

TIMELINE = {
    "ready spot replicas": "#56b4e9",
    "ready on-demand replicas": "#e69f00",
    "fewer ready than the target": "#f6d5d5",
    "preemption": "#a01c2c",
    "minute with failed requests": "#3a4652",
}
"""The colours of the charts of one window."""
_TIMELINE_INCHES = (5.6, 2.3)
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_OPTIMUM = "#1c2733"
_MARKERS = "osD^vPX*"
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.6g} %")


def colours(names: Sequence[str]) -> dict[str, str]:
    """Returns the colour of each policy."""
    return {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}


def overview(results: Mapping[str, CaseResult], optimum: OptimumResult | None) -> Picture:
    """Returns the chart of availability against cost, with a point for each policy."""
    return _plane("Availability and cost", {name: {None: one} for name, one in results.items()}, optimum)


def frontier(found: SweepResult, names: Sequence[str], optimum: OptimumResult | None) -> Picture:
    """Returns the chart of availability against cost for a sweep, with a line through the values of each policy.

    `names` are all policies, so that each keeps its colour.
    """
    lines: dict[str, dict[float | None, CaseResult]] = {name: {} for name in names}
    for (name, value), one in found.results.items():
        lines[name][value] = one
    return _plane(f"Availability and cost by {found.sweep.field}", lines, found.optimum(optimum))


def _plane(
    title: str, lines: Mapping[str, Mapping[float | None, CaseResult]], optimum: OptimumResult | None
) -> Picture:
    """Returns the chart of availability against cost, with the points of each policy by the value of a setting."""
    means = {name: {value: one.means() for value, one in points.items()} for name, points in lines.items()}

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(means.items()):
            # Each marker is smaller than the markers before it, so that equal policies stay visible.
            size = 6 + 7 * (len(means) - 1 - number) / max(1, len(means) - 1)
            axes.errorbar(
                [one["cost"].mean for one in points.values()],
                [one["availability"].mean for one in points.values()],
                xerr=[one["cost"].standard_error for one in points.values()],
                yerr=[one["availability"].standard_error for one in points.values()],
                color=colours(list(means))[name],
                marker=_MARKERS[number % len(_MARKERS)],
                ms=size if len(points) == 1 else 4,
                lw=0.9,
            )
            for value, one in points.items():
                if value is not None:
                    at = one["cost"].mean, one["availability"].mean
                    axes.annotate(f"{value:g}", at, (4, -3), textcoords="offset points", va="top", fontsize=7)
        if optimum is not None:
            reading = next(iter(optimum.by_reading))
            at = optimum.mean(reading, "cost").mean, optimum.mean(reading, "availability").mean
            axes.plot(*at, "*", color=_OPTIMUM, ms=11)
            axes.annotate("optimum", at, (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=8)
        axes.set_xlabel("cost over all on-demand")
        axes.set_ylabel("availability")
        axes.set_xlim(0)
        least = min(one["availability"].mean for points in means.values() for one in points.values())
        low = max(0.0, least - min(0.05, 1 - least)) if least > 0.5 else 0.0
        axes.set_ylim(low, 1 + 0.05 * (1 - low))
        axes.xaxis.set_major_formatter(_PERCENT)
        axes.yaxis.set_major_formatter(_PERCENT)

    return picture(title, "Means over the windows; bars are standard errors.", draw)


def latency(results: Mapping[str, CaseResult]) -> list[Picture]:
    """Returns the charts of the requests' latency and failures."""
    found = {name: one.latency_means() for name, one in results.items()}

    def draw_latency(axes: Axes) -> None:
        for number, (name, means) in enumerate(found.items()):
            if means:
                values = [means[field].mean for field in ("p50_s", "p90_s", "p99_s")]
                axes.plot([number] * 2, [values[0], values[-1]], color=colours(list(found))[name], lw=1.4)
                for value, marker in zip(values, "o_^", strict=True):
                    axes.plot(number, value, marker, color=colours(list(found))[name], ms=7)
        _seconds(axes)
        _policies(axes, list(found))
        axes.set_ylabel("seconds (○ P50, – P90, △ P99)")

    def draw_failures(axes: Axes) -> None:
        for number, (name, means) in enumerate(found.items()):
            value = means["failed_share"].mean if means else 0.0
            axes.bar(number, value, 0.6, color=colours(list(found))[name])
            axes.annotate(f"{100 * value:.2f} %", (number, value), (0, 1), textcoords="offset points", ha="center",
                          va="bottom", fontsize=7)  # fmt: skip
        _policies(axes, list(found))
        axes.set_ylabel("failed")
        axes.margins(y=0.15)
        _percent(axes)

    return [
        picture("Latency of requests", "A failed request counts with the timeout as its latency.", draw_latency),
        picture("Failed requests", "Share of requests that were not answered before their timeout.", draw_failures),
    ]


def timeline(
    name: str, spans: Sequence[ReplicaSpan], length_s: float, target: int, most: int, failed_s: Sequence[float]
) -> Picture:
    """Returns the chart of one window of a policy.

    Args:
        name: the policy.
        spans: the replicas of the window.
        length_s: the length of the window in seconds.
        target: N_tar.
        most: the largest number of ready replicas that the axis shows.
        failed_s: the times at which failed requests had arrived.
    """

    def draw(axes: Axes) -> None:
        at_s, spot, on_demand = ready_counts(spans, length_s)
        at_h = at_s / 3600
        total = spot + on_demand
        low = (total < target).astype(float) * (most + 2)
        axes.fill_between(at_h, 0, low, step="post", color=TIMELINE["fewer ready than the target"], lw=0)
        axes.fill_between(at_h, 0, spot, step="post", color=TIMELINE["ready spot replicas"], lw=0)
        axes.fill_between(at_h, spot, total, step="post", color=TIMELINE["ready on-demand replicas"], lw=0)
        axes.axhline(target, color="#1c2733", lw=0.9, ls="--")
        lost_h = [one.ended_s / 3600 for one in spans if one.preempted]
        axes.plot(lost_h, [most + 0.55] * len(lost_h), "v", color=TIMELINE["preemption"], ms=4)
        # One mark per minute, because a window can have many thousands of failures.
        failed_h = sorted({int(one // 60) / 60 for one in failed_s})
        axes.plot(failed_h, [-0.3] * len(failed_h), "|", color=TIMELINE["minute with failed requests"], ms=5)
        axes.set_xlim(0, length_s / 3600)
        axes.set_ylim(-0.6, most + 1)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("hours since the start of the window")
        axes.set_ylabel("replicas")

    return picture(name, _says(spans, failed_s), draw, _TIMELINE_INCHES)


def ready_counts(
    spans: Sequence[ReplicaSpan], length_s: float
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """Returns times in seconds, and the numbers of ready spot and on-demand replicas from each time to the next.

    The first time is 0 and the last is the end of the window.
    """
    changes: dict[float, list[int]] = {0.0: [0, 0], length_s: [0, 0]}
    for one in spans:
        if one.ready_s is not None:
            kind = 0 if one.kind is CapacityKind.SPOT else 1
            changes.setdefault(one.ready_s, [0, 0])[kind] += 1
            if one.ended_s < length_s:
                changes.setdefault(one.ended_s, [0, 0])[kind] -= 1
    at_s = sorted(changes)
    counts = np.cumsum([changes[one] for one in at_s], axis=0, dtype=np.float64)
    return np.asarray(at_s), counts[:, 0], counts[:, 1]


def sweep(found: SweepResult, names: Sequence[str]) -> list[Picture]:
    """Returns the charts of a sweep. `names` are all policies, so that each keeps its colour."""
    field, values = found.sweep.field, found.sweep.values
    means = {key: {**one.means(), **one.latency_means()} for key, one in found.results.items()}

    def chart(title: str, measured: str, adapt: Callable[[Axes], None]) -> Picture:
        def draw(axes: Axes) -> None:
            for number, name in enumerate(names):
                points = [(value, means[name, value][measured]) for value in values if (name, value) in means
                          and measured in means[name, value]]  # fmt: skip
                points.sort(key=lambda one: one[0])
                width = 1.1 + 2.2 * (len(names) - 1 - number) / max(1, len(names) - 1)
                _line(axes, points, colours(names)[name], _MARKERS[number % len(_MARKERS)], width)
            axes.set_xlabel(field)
            axes.set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)])
            adapt(axes)

        return picture(f"{title} by {field}", "Means over the windows; bars are standard errors.", draw)

    charts = [chart("Availability", "availability", _percent), chart("Cost", "cost", _percent)]
    if any(one.latency for one in found.results.values()):
        charts += [chart("P99 latency", "p99_s", _seconds), chart("Failed requests", "failed_share", _percent)]
    return charts


def _line(axes: Axes, points: Sequence[tuple[float, Mean]], colour: str, marker: str, width: float) -> None:
    at = [value for value, _ in points]
    means = [one.mean for _, one in points]
    errors = [one.standard_error for _, one in points]
    axes.errorbar(at, means, yerr=errors, color=colour, marker=marker, ms=2 + 2 * width, lw=width, elinewidth=0.9)


def _says(spans: Sequence[ReplicaSpan], failed_s: Sequence[float]) -> str:
    lost = sum(one.preempted for one in spans)
    failed = f", {len(failed_s):,} failed requests" if failed_s else ""
    return f"{len(spans):,} launches, {lost:,} preemptions{failed}."


def _percent(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low) if low > 0.5 else 0.0, high if high > 0 else 0.01)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(_PERCENT)


def _seconds(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.2, high * 1.2)
    axes.yaxis.set_major_locator(FixedLocator([one for one in _SECONDS if low / 1.2 <= one <= high * 1.2]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))


def _policies(axes: Axes, names: Sequence[str]) -> None:
    few = len(names) <= 4
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=0 if few else 30, ha="center" if few else "right")
    axes.set_xlim(-0.6, max(len(names), 2) - 0.4)
    axes.grid(False, axis="x")
