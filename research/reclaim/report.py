"""Renders the report of `mizzen reclaim simulate`: one self-contained HTML file with tables and charts."""

from collections.abc import Iterable, Mapping
from html import escape

import numpy as np
from matplotlib.axes import Axes

from infra.reports.charts import COLOURS, INK, PERCENT, Picture, picture
from infra.reports.page import grid, muted, page
from research.reclaim.compare import Figures, figures
from research.reclaim.published_tables import TABLE_3, TABLE_4
from research.reclaim.results import Results
from research.reclaim.scenario import EPOCH_S, LendingScenario
from research.reclaim.systems import SYSTEMS
from research.reclaim.tables import tables


def render(found: Results) -> str:
    """Returns the HTML page of a command that has simulated at least one system."""
    results = figures(found.rows)
    parts = [muted(found.about())]
    for heading, table in tables(results).items():
        parts += [f"<h2>{heading}</h2>", table.html()]
        if heading == "Systems":
            items = (f"<li><b>{escape(name)}</b>: {escape(SYSTEMS[name].about)}</li>" for name in results)
            parts.append(f"<ul>{''.join(items)}</ul>")
    parts += ["<h2>Charts</h2>", grid([losses(results), *seeds(results), day(found.scenario)])]
    return page(f"Machines that are taken back: {found.scenario.name}", parts)


def losses(results: Mapping[str, Figures]) -> Picture:
    """Returns the chart of work loss relative to slurm-pr, with that of Tables III and IV."""
    base = results.get("slurm-pr", next(iter(results.values()))).mean("loss_gpu_h") or 1.0
    known = {name: row[0] for name, row in TABLE_4.items()} | {name: row.loss_gpu_h for name, row in TABLE_3.items()}

    def draw(axes: Axes) -> None:
        place = np.arange(len(results))
        ours = [one.mean("loss_gpu_h") / base for one in results.values()]
        published = [known.get(name, np.nan) / TABLE_3["slurm-pr"].loss_gpu_h for name in results]
        axes.barh(place - 0.2, ours, 0.36, color=COLOURS[0], label="measured")
        axes.barh(place + 0.2, published, 0.36, color=COLOURS[4], label="in the paper")
        axes.legend(loc="lower right", frameon=False)
        _systems(axes, results, "relative to slurm-pr")
        axes.grid(axis="y", visible=False)

    return picture("Work loss", "Measured: mean over seeds. In the paper: Tables III and IV.", draw)


def seeds(results: Mapping[str, Figures]) -> Iterable[Picture]:
    """Yields charts with a point for each seed."""

    def chart(title: str, name: str, label: str) -> Picture:
        def draw(axes: Axes) -> None:
            for number, one in enumerate(results.values()):
                values = one.values(name)
                axes.plot(values, [number] * len(values), "o", color=COLOURS[0], ms=4, alpha=0.6)
                if values:
                    axes.plot(one.mean(name), number, "|", color=INK, ms=12, mew=1.6)
            _systems(axes, results, label)
            if name != "loss_gpu_h":
                axes.xaxis.set_major_formatter(PERCENT)

        return picture(title, "A point for each seed; the line is the mean.", draw)

    yield chart("Work loss by seed", "loss_gpu_h", "GPU hours")
    yield chart("Migration success", "success", "running again within 10 minutes")
    yield chart("Research traffic displaced", "degradation", "on links with migrations")


def day(scenario: LendingScenario) -> Picture:
    """Returns the chart of hazard and bandwidth over the day."""
    hours = (scenario.start_s % 86400 + np.arange(scenario.epochs) * EPOCH_S) % 86400 / 3600
    part = np.floor(hours * 2).astype(int)
    hazard = scenario.emergency_per_h.mean(0)

    def mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
        return [float(values[part == n].mean()) if (part == n).any() else float("nan") for n in range(48)]

    per_epoch = scenario.links_bytes_s.shape[1] // scenario.epochs
    links = scenario.links_bytes_s[:, : per_epoch * scenario.epochs].reshape(-1, scenario.epochs, per_epoch).mean(2)
    relative = (links / links.mean(1, keepdims=True)).mean(0)

    def draw(axes: Axes) -> None:
        at = np.arange(48) / 2 + 0.25
        axes.plot(at, np.array(mean(hazard)) / max(float(hazard.mean()), 1e-12), color=COLOURS[1], lw=1.6)
        axes.plot(at, mean(relative), color=COLOURS[0], lw=1.6)
        axes.set_xlim(0, 24)
        axes.set_ylim(0)
        axes.set_xlabel("hour of the day (UTC)")
        axes.set_ylabel("relative to the mean")

    said = "Orange: hazard of departures without notice. Blue: bandwidth of all links. First seed."
    return picture("Hazard and bandwidth over the day", said, draw)


def _systems(axes: Axes, results: Mapping[str, Figures], label: str) -> None:
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set_xlabel(label)
