"""The report of a run: what happened to the replicas and to the requests, as a page with a picture."""

import json
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from infra.reports.charts import ALARM, INK, Picture, events, svg
from infra.reports.page import grid, muted, page
from infra.reports.tables import ReportTable
from rigs.demos.serving.load import Request
from rigs.demos.serving.scenario import ON_DEMAND, SPOT, Course

_COLOURS = ("#56b4e9", "#e69f00")
_BOUND = 0.001


def rows(course: Course) -> list[tuple[str, str]]:
    """Returns the figures of a run, each with its name."""
    found = course.outcome
    assert found is not None
    median, most, worst = (f"{1000 * value:.0f} ms" for value in found.first_byte_s)
    usd, whole = course.usd(SPOT), course.usd(ON_DEMAND)
    target = course.samples[SPOT][0].target
    return [
        ("requests", f"{found.requests:,}"),
        ("failed", f"{len(found.failed)} ({100 * found.failed_share:.3f} %; required: at most {100 * _BOUND:g} %)"),
        ("streams cut by a lost replica", str(found.cut)),
        ("open in the balancer when it was killed", str(found.open_in_killed)),
        ("time to the first byte, P50, P90, P99", f"{median}, {most}, {worst}"),
        (f"availability: time with at least {target} ready replicas", f"{100 * course.availability(SPOT):.2f} %"),
        ("availability of the service on on-demand machines", f"{100 * course.availability(ON_DEMAND):.2f} %"),
        ("cost of its machines", f"${usd:.3f}, {100 * usd / whole:.0f} % of ${whole:.3f} on demand"),
        ("preempted replicas", str(course.preemptions)),
    ]


def picture(course: Course, requests: list[Request]) -> Picture:
    """Returns the chart of replicas over time, requests over time, and what was killed when."""
    length_s = course.ended_s - course.began_s
    unit, step = ("minutes", 60.0) if length_s >= 300 else ("seconds", 10.0)

    def draw(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _replicas(top, course)
        _requests(bottom, course, requests)
        bottom.set_xlabel(unit)
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value / (60.0 if unit == 'minutes' else 1.0):g}")
        bottom.set_xticks(np.arange(0, length_s + 1, step))
        bottom.set_xlim(0, length_s)
        for at_s, _ in course.events:
            for axes in (top, bottom):
                axes.axvline(at_s - course.began_s, color=INK, lw=0.8, ls=":")
        events(top, [(at_s - course.began_s, text) for at_s, text in course.events])

    return Picture("Ready replicas and requests over time.", svg(draw, (9.0, 4.6)))


def _replicas(axes: Axes, course: Course) -> None:
    own = course.samples[SPOT]
    times = [one.at_s - course.began_s for one in own]
    counts = [
        [sum(count for place, count in one.ready.items() if place.startswith(kind)) for one in own]
        for kind in ("spot", "on_demand")
    ]
    labels = ("ready on spot machines", "ready on on-demand machines")
    axes.stackplot(times, *counts, step="post", colors=_COLOURS, labels=labels)
    axes.step(times, [one.target for one in own], where="post", color=INK, lw=1.2, label="target")
    axes.set_ylabel("replicas")
    axes.set_ylim(0, max(map(sum, zip(*counts, strict=True))) + 0.6)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(loc="lower right", fontsize=7.5, ncols=3, framealpha=0.9)


def _requests(axes: Axes, course: Course, requests: list[Request]) -> None:
    seconds = round(course.ended_s - course.began_s)
    width = max(1, seconds // 120)
    edges = np.arange(0, seconds + width, width)
    under = np.zeros(len(edges) - 1)
    for colour, label, good in (("#b7c4d0", "answered", True), (ALARM, "failed, cut, or open when killed", False)):
        at_s = [r.began_s - course.began_s for r in requests if (r.outcome == "ok") is good]
        rates = np.histogram(at_s, edges)[0] / width
        axes.bar(edges[:-1], rates, width, bottom=under, align="edge", color=colour, label=label)
        under = rates
    axes.set_ylabel("requests/s")
    axes.legend(loc="lower right", fontsize=7.5, ncols=2, framealpha=0.9)


def write_report(course: Course, requests: Path, folder: Path) -> Path:
    """Writes `report.html` into a folder; returns its path."""
    read = [Request(**json.loads(line)) for line in requests.read_text().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    killed = (f"<li>{at_s - course.began_s:.1f} s: {escape(text)}</li>" for at_s, text in sorted(course.events))
    parts = [
        muted(
            "A constant load from a separate process, no retries by the client. A second service on on-demand machines "
            "runs beside it, without load."
        ),
        grid([picture(course, read)], "whole"),
        ReportTable(("figure", "value"), rows(course), texts=2).html(),
        f"<h2>What was killed</h2><ol>{''.join(killed)}</ol>",
    ]
    path = folder / "report.html"
    path.write_text(page("A service on spot machines while parts of it are killed", parts))
    return path
