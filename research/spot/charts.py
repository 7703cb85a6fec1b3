"""The charts of the report of `mizzen spot replay`."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from domain.capacity import CapacityKind
from infra.reports.charts import (
    ALARM,
    INK,
    PERCENT,
    Picture,
    bars,
    colours,
    name_axis,
    percentiles,
    picture,
    value_ticks,
)
from infra.reports.formats import percent
from research.spot.outcome import ReplayOutcome
from research.spot.replay import ReplicaSpan
from research.spot.runs import CaseResult, OptimumResult
from research.spot.sweeps import SweepResult
from research.spot.windows import Mean

FAILED = "minute with failed requests"
TIMELINE = {
    "ready spot replicas": "#56b4e9",
    "ready on-demand replicas": "#e69f00",
    "fewer ready than the target": "#f6d5d5",
    "preemption": ALARM,
    FAILED: INK,
}
"""The colours of the charts of one window."""
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_MARKERS = "osD^vPX*"
_SAYS = "Means over the windows; bars are standard errors."
_Points = Mapping[float | None, CaseResult]


class Charts:
    """The charts of one outcome; each policy has the same colour and marker in all."""

    def __init__(self, outcome: ReplayOutcome) -> None:
        self._outcome = outcome
        self._colours = colours(outcome.policies)
        self._markers = {name: _MARKERS[k % len(_MARKERS)] for k, name in enumerate(outcome.policies)}
        count = max(1, len(outcome.policies) - 1)
        # Each line and marker is smaller than those before it, so that equal policies stay visible: from 1 to 0.
        self._sizes = {name: (count - k) / count for k, name in enumerate(outcome.policies)}

    def overview(self) -> Picture:
        """Returns the chart of availability against cost, with a point for each policy."""
        points: dict[str, _Points] = {name: {None: one} for name, one in self._outcome.policies.items()}
        return self._plane("Availability and cost", points, self._outcome.optimum)

    def frontier(self, found: SweepResult) -> Picture:
        """Returns the chart of availability against cost for a sweep, with a line through the values of each policy."""
        lines: dict[str, dict[float | None, CaseResult]] = {name: {} for name in self._colours}
        for (name, value), one in found.results.items():
            lines[name][value] = one
        title = f"Availability and cost by {found.sweep.field}"
        return self._plane(title, lines, found.optimum(self._outcome.optimum))

    def _plane(self, title: str, lines: Mapping[str, _Points], optimum: OptimumResult | None) -> Picture:
        """Returns the chart of availability against cost, with the points of each policy by the value of a setting."""

        def draw(axes: Axes) -> None:
            least = 1.0
            for name, points in lines.items():
                means = {value: one.means() for value, one in points.items()}
                costs, shares = ([one[of] for one in means.values()] for of in ("cost", "availability"))
                self._line(axes, name, costs, shares, 6 + 7 * self._sizes[name] if len(points) == 1 else 4, 0.9)
                least = min(least, *(share.mean for share in shares), 1.0)
                for value, cost, share in zip(points, costs, shares, strict=True):
                    if value is not None:
                        at = cost.mean, share.mean
                        axes.annotate(f"{value:g}", at, (4, -3), textcoords="offset points", va="top", fontsize=7)
            if optimum is not None:
                reading = next(iter(optimum.by_reading))
                at = optimum.mean(reading, "cost").mean, optimum.mean(reading, "availability").mean
                axes.plot(*at, "*", color=INK, ms=11)
                axes.annotate("optimum", at, (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=8)
            axes.set_xlabel("cost over all on-demand")
            axes.set_ylabel("availability")
            axes.set_xlim(0)
            low = max(0.0, least - min(0.05, 1 - least)) if least > 0.5 else 0.0
            axes.set_ylim(low, 1 + 0.05 * (1 - low))
            axes.xaxis.set_major_formatter(PERCENT)
            axes.yaxis.set_major_formatter(PERCENT)

        return picture(title, _SAYS, draw)

    def _line(
        self, axes: Axes, name: str, at: Sequence[Mean | float], values: Sequence[Mean], size: float, width: float
    ) -> None:
        """Draws means with their standard errors in both directions."""
        across = [one if isinstance(one, Mean) else Mean(one, 0.0) for one in at]
        axes.errorbar(
            [one.mean for one in across],
            [one.mean for one in values],
            xerr=[one.standard_error for one in across] if isinstance(next(iter(at), None), Mean) else None,
            yerr=[one.standard_error for one in values],
            color=self._colours[name], marker=self._markers[name], ms=size, lw=width, elinewidth=0.9,
        )  # fmt: skip

    def latency(self) -> list[Picture]:
        """Returns the charts of the requests' latency and failures."""
        found = {name: one.latency_means() for name, one in self._outcome.policies.items()}

        def draw_latency(axes: Axes) -> None:
            for k, (name, means) in enumerate(found.items()):
                if means:
                    values = [means[of].mean for of in ("p50_s", "p90_s", "p99_s")]
                    percentiles(axes, k, values, self._colours[name])
            _second_axis(axes)
            name_axis(axes, list(found))
            axes.set_ylabel("seconds (○ P50, – P90, △ P99)")

        def draw_failures(axes: Axes) -> None:
            failed = {name: means["failed_share"].mean if means else 0.0 for name, means in found.items()}
            bars(axes, failed, percent)
            axes.set_ylabel("failed")
            _share_axis(axes)

        said = "Share of requests that were not answered before their timeout."
        return [
            picture("Latency of requests", "A failed request counts with the timeout as its latency.", draw_latency),
            picture("Failed requests", said, draw_failures),
        ]

    def sweep(self, found: SweepResult) -> list[Picture]:
        """Returns the charts of a sweep."""
        field, values = found.sweep.field, sorted(found.sweep.values)
        means = {key: {**one.means(), **one.latency_means()} for key, one in found.results.items()}

        def chart(title: str, measured: str, adapt: Callable[[Axes], None]) -> Picture:
            def draw(axes: Axes) -> None:
                for name in self._colours:
                    at = [value for value in values if measured in means.get((name, value), {})]
                    width = 1.1 + 2.2 * self._sizes[name]
                    self._line(axes, name, at, [means[name, value][measured] for value in at], 2 + 2 * width, width)
                axes.set_xlabel(field)
                axes.set_xticks(values, [f"{value:g}" for value in values])
                adapt(axes)

            return picture(f"{title} by {field}", _SAYS, draw)

        charts = [chart("Availability", "availability", _share_axis), chart("Cost", "cost", _share_axis)]
        if any(one.latency for one in found.results.values()):
            charts += [chart("P99 latency", "p99_s", _second_axis)]
            charts += [chart("Failed requests", "failed_share", _share_axis)]
        return charts


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
    bad, spot_colour, other = (TIMELINE[text] for text in ("fewer ready than the target", *list(TIMELINE)[:2]))

    def draw(axes: Axes) -> None:
        at_s, spot, on_demand = ready_counts(spans, length_s)
        at_h, total = at_s / 3600, spot + on_demand
        axes.fill_between(at_h, 0, (total < target).astype(float) * (most + 2), step="post", color=bad, lw=0)
        axes.fill_between(at_h, 0, spot, step="post", color=spot_colour, lw=0)
        axes.fill_between(at_h, spot, total, step="post", color=other, lw=0)
        axes.axhline(target, color=INK, lw=0.9, ls="--")
        lost_h = [one.ended_s / 3600 for one in spans if one.preempted]
        axes.plot(lost_h, [most + 0.55] * len(lost_h), "v", color=TIMELINE["preemption"], ms=4)
        # One mark per minute, because a window can have many thousands of failures.
        failed_h = sorted({int(one // 60) / 60 for one in failed_s})
        axes.plot(failed_h, [-0.3] * len(failed_h), "|", color=TIMELINE[FAILED], ms=5)
        axes.set_xlim(0, length_s / 3600)
        axes.set_ylim(-0.6, most + 1)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("hours since the start of the window")
        axes.set_ylabel("replicas")

    lost = sum(one.preempted for one in spans)
    failed = f", {len(failed_s):,} failed requests" if failed_s else ""
    return picture(name, f"{len(spans):,} launches, {lost:,} preemptions{failed}.", draw, (5.6, 2.3))


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


def _share_axis(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low) if low > 0.5 else 0.0, high if high > 0 else 0.01)
    value_ticks(axes)
    axes.yaxis.set_major_formatter(PERCENT)


def _second_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.2, high * 1.2)
    axes.yaxis.set_major_locator(FixedLocator([one for one in _SECONDS if low / 1.2 <= one <= high * 1.2]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
