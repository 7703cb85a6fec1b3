"""The report of a run: what happened to the replicas and to the requests, as a page and as a picture."""

import base64
import io
import json
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rigs.demos.serving.load import Request
from rigs.demos.serving.scenario import ON_DEMAND, SPOT, Course
from simulation.pictures import STYLE

_SPOT, _ON_DEMAND, _BAD, _INK = "#56b4e9", "#e69f00", "#a01c2c", "#3a4652"
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
    ]  # fmt: skip


def picture(course: Course, requests: list[Request]) -> bytes:
    """Returns a PNG: replicas over time, requests over time, and what was killed when."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _replicas(top, course)
        _requests(bottom, course, requests)
        unit = 60.0 if course.ended_s - course.began_s >= 300 else 1.0
        bottom.set_xlabel("minutes" if unit == 60.0 else "seconds")
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}")
        bottom.set_xticks(np.arange(0, course.ended_s - course.began_s + 1, unit if unit == 60.0 else 10.0))
        bottom.set_xlim(0, course.ended_s - course.began_s)
        for number, (at_s, text) in enumerate(course.events, 1):
            for axes in (top, bottom):
                axes.axvline(at_s - course.began_s, color=_INK, lw=0.8, ls=":")
            top.annotate(
                f"{number} {text}", (at_s - course.began_s, 1.02), xycoords=("data", "axes fraction"), fontsize=7.5,
                rotation=18, ha="left", va="bottom", color=_INK,
            )  # fmt: skip
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110)
        return out.getvalue()


def _replicas(axes: Axes, course: Course) -> None:
    own = course.samples[SPOT]
    times = [one.at_s - course.began_s for one in own]
    counts = {
        kind: [sum(count for place, count in one.ready.items() if place.startswith(kind)) for one in own]
        for kind in ("spot", "on_demand")
    }
    axes.stackplot(
        times, counts["spot"], counts["on_demand"], step="post", colors=(_SPOT, _ON_DEMAND),
        labels=("ready on spot machines", "ready on on-demand machines"),
    )  # fmt: skip
    axes.step(times, [one.target for one in own], where="post", color=_INK, lw=1.2, label="target")
    axes.set_ylabel("replicas")
    axes.set_ylim(0, max(map(sum, zip(*counts.values(), strict=True))) + 0.6)
    axes.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.legend(loc="lower right", fontsize=7.5, ncols=3, framealpha=0.9)


def _requests(axes: Axes, course: Course, requests: list[Request]) -> None:
    seconds = round(course.ended_s - course.began_s)
    width = max(1, seconds // 120)
    edges = np.arange(0, seconds + width, width)
    ok = np.histogram([r.began_s - course.began_s for r in requests if r.outcome == "ok"], edges)[0] / width
    bad = np.histogram([r.began_s - course.began_s for r in requests if r.outcome != "ok"], edges)[0] / width
    axes.bar(edges[:-1], ok, width, align="edge", color="#b7c4d0", label="answered")
    axes.bar(edges[:-1], bad, width, bottom=ok, align="edge", color=_BAD, label="failed, cut, or open when killed")
    axes.set_ylabel("requests/s")
    axes.legend(loc="lower right", fontsize=7.5, ncols=2, framealpha=0.9)


def write_report(course: Course, requests: Path, folder: Path) -> Path:
    """Writes `report.html` and `report.png` into a folder; returns the page's path."""
    read = [Request(**json.loads(line)) for line in requests.read_text().splitlines()]
    png = picture(course, read)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.png").write_bytes(png)
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows(course))
    happened = "".join(
        f"<li>{at_s - course.began_s:.1f} s: {escape(text)}</li>" for at_s, text in sorted(course.events)
    )
    image = base64.b64encode(png).decode()
    page = folder / "report.html"
    page.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>A service on spot machines</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}}
img{{max-width:100%}}th{{text-align:left;font-weight:400;padding-right:2rem;vertical-align:top}}td{{font-weight:600}}
</style>
<h1>A service on spot machines while parts of it are killed</h1>
<p>A constant load from a separate process, no retries by the client. A second service on on-demand machines runs beside
it, without load.</p>
<img alt="Ready replicas and requests over time" src="data:image/png;base64,{image}">
<table>{table}</table><h2>What was killed</h2><ol>{happened}</ol></html>
"""
    )
    return page
