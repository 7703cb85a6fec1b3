"""Renders the report of `mizzen reclaim simulate`: one self-contained HTML file with tables and charts."""

from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from research.reclaim.command_run import Simulated, about
from research.reclaim.compare import Figures, figures
from research.reclaim.published import TABLE_3, TABLE_4
from research.reclaim.scenario import EPOCH_S, Scenario
from research.reclaim.systems import SYSTEMS
from research.reclaim.tables import ablation_table, bounds_table, main_table, more_table
from research.spot.tables import Table
from simulation.page import figure, head, table
from simulation.pictures import COLOURS, Picture, picture

_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.6g} %")


def render(found: Simulated) -> str:
    """Returns the HTML page of a command that has simulated at least one system."""
    results = figures(found.rows)
    title = f"Machines that are taken back: {found.scenario.name}"
    parts = [head(title), f"<h1>{escape(title)}</h1>", f'<p class="muted">{escape(about(found))}</p>']
    parts += ["<h2>Systems</h2>", _table(main_table(results)), _systems(list(results))]
    for heading, one in (
        ("Bounds", bounds_table(results)),
        ("Protocols alone and together", ablation_table(results)),
        ("More values", more_table(results)),
    ):
        if len(one.rows) > 1:
            parts += [f"<h2>{heading}</h2>", _table(one)]
    drawn = [losses(results), *seeds(results), *day(found.scenario)]
    parts += ["<h2>Charts</h2>", '<div class="grid">', *map(figure, drawn), "</div>"]
    return "\n".join([*parts, "</body></html>\n"])


def losses(results: dict[str, Figures]) -> Picture:
    """Returns the chart of work loss relative to slurm-pr, beside that of Tables III and IV."""
    base = results.get("slurm-pr", next(iter(results.values()))).mean("loss_gpu_h") or 1.0

    def draw(axes: Axes) -> None:
        names = list(results)
        place = np.arange(len(names))
        ours = [results[name].mean("loss_gpu_h") / base for name in names]
        known = {name: row[0] for name, row in TABLE_4.items()}
        known |= {name: row.loss_gpu_h for name, row in TABLE_3.items()}
        published = [known.get(name, np.nan) / TABLE_3["slurm-pr"].loss_gpu_h for name in names]
        axes.barh(place - 0.2, ours, 0.36, color=COLOURS[0], label="measured")
        axes.barh(place + 0.2, published, 0.36, color=COLOURS[4], label="in the paper")
        axes.legend(loc="lower right", frameon=False)
        axes.set_yticks(place, names)
        axes.invert_yaxis()
        axes.set_xlabel("relative to slurm-pr")
        axes.grid(axis="y", visible=False)

    return picture("Work loss", "Measured: mean over seeds. In the paper: Tables III and IV.", draw)


def seeds(results: dict[str, Figures]) -> list[Picture]:
    """Returns charts with a point for each seed."""

    def chart(title: str, name: str, label: str, says: str, *, percent: bool = False) -> Picture:
        def draw(axes: Axes) -> None:
            for number, one in enumerate(results.values()):
                values = one.values(name)
                axes.plot(values, [number] * len(values), "o", color=COLOURS[0], ms=4, alpha=0.6)
                if values:
                    axes.plot(one.mean(name), number, "|", color="#1c2733", ms=12, mew=1.6)
            axes.set_yticks(range(len(results)), list(results))
            axes.invert_yaxis()
            axes.set_xlabel(label)
            if percent:
                axes.xaxis.set_major_formatter(_PERCENT)

        return picture(title, says, draw)

    said = "A point for each seed; the line is the mean."
    return [
        chart("Work loss by seed", "loss_gpu_h", "GPU hours", said),
        chart("Migration success", "success", "running again within 10 minutes", said, percent=True),
        chart("Research traffic displaced", "degradation", "on links with migrations", said, percent=True),
    ]


def day(scenario: Scenario) -> list[Picture]:
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
    return [picture("Hazard and bandwidth over the day", said, draw)]


def _systems(names: list[str]) -> str:
    items = "".join(f"<li><b>{escape(name)}</b>: {escape(SYSTEMS[name].about)}</li>" for name in names)
    return f"<ul>{items}</ul>"


def _table(found: Table) -> str:
    columns, rows = found.rows[0], found.rows[1:]
    cells = ([escape(text) for text in row] for row in rows)
    note = "<br>".join(map(escape, found.note.splitlines()))
    return f'{table([escape(one) for one in columns], cells)}<p class="muted">{note}</p>'
