"""Writes the tables and the picture of docs/experiments-pools.md between two markers; the text around them is kept."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from infra.reports.charts import COLOURS, panels
from infra.reports.formats import span
from infra.reports.tables import ReportTable, write_between
from research.experiments.cases import TRACES, ExperimentCase
from research.experiments.pools.fleets import BOTH, FLEETS, LOAD, PEAK, SEEDS, SPOT
from research.experiments.report import LEVELS

BEGIN, END = "<!-- tables: written by `make experiment-pools` -->", "<!-- end of the tables -->"
_LEVEL, _WITHIN, _WAIT_S = 0, 2, 3
"""Indexes of the columns of a wait in an outcome (`research.experiments.replay.COLUMNS`)."""
Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""Outcomes by fleet, one for each seed."""


def write_report(out: Path, report: Path) -> None:
    """Writes the tables of the outcomes in `out` into the report, and the picture into a folder beside it."""
    parts, charts = [], {}
    for trace in TRACES:
        found = _load(out, trace)
        if found[PEAK]:
            parts += [f"### {trace}", f"Number of seeds that were run: {len(found[PEAK])} of {len(SEEDS)}."]
            parts += [_costs(found), _waits(found), _waits(found, within_quota=True), _worth(found), _losses(found)]
            charts[f"{trace}: GPUs available, and held (dotted)"] = partial(_chart, found=found)
    if not parts:
        return
    picture = report.parent / "experiments" / "pools.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(panels(charts, 3.0))
    write_between(report, BEGIN, END, "\n\n".join(["![GPUs over time](experiments/pools.svg)", *parts]))


def _load(out: Path, trace: str) -> Found:
    """Returns the outcomes of the seeds for which every fleet was run."""
    folders = [ExperimentCase(trace, LOAD, seed).folder(out) for seed in SEEDS]
    whole = [folder for folder in folders if all((folder / f"{fleet}.json").exists() for fleet in FLEETS)]
    return {fleet: [json.loads((folder / f"{fleet}.json").read_text()) for folder in whole] for fleet in FLEETS}


def _sum(of: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(one["machines"][name] for one in of))


def _costs(found: Found) -> str:
    rows = []
    for fleet, of in found.items():
        usd = _sum(of, "usd")
        kinds = [sum(one["machines"]["usd_by"][kind] for one in of) for kind in ("reserved", "on_demand", "spot")]
        finished = sum(sum(one["finished_gpu_h"].values()) for one in of)
        rows.append(
            [
                FLEETS[fleet],
                f"${usd / len(of):,.0f}",
                f"{100 * usd / _sum(found[PEAK], 'usd'):.0f} %",
                *(f"${part / len(of):,.0f}" for part in kinds),
                f"{_sum(of, 'available_gpu_hours') / len(of):,.0f}",
                f"{finished / len(of):,.0f}",
                f"${usd / finished:.2f}",
            ]
        )
    head = (
        "fleet", "cost", "relative to the first", "cost: static", "cost: on demand", "cost: spot", "GPU h available",
        "GPU h finished", "cost per finished GPU h",
    )  # fmt: skip
    return ReportTable(head, rows).markdown()


def _waits(found: Found, *, within_quota: bool = False) -> str:
    rows = []
    for fleet, of in found.items():
        cells = [FLEETS[fleet]]
        for levels in LEVELS.values():
            waits = np.array(
                [
                    w[_WAIT_S]
                    for one in of
                    for w in one["waits"]["start"]
                    if w[_LEVEL] in levels and w[_WITHIN] >= within_quota
                ]
            )
            if not len(waits):
                cells += ["", ""]
                continue
            p50, p95, p99 = np.percentile(waits, (50, 95, 99), method="inverted_cdf")
            cells += [span(float(waits.mean())), " / ".join(span(float(p)) for p in (p50, p95, p99))]
        rows.append(cells)
    head = ["waits until running" + (", within quota" if within_quota else "")]
    for name in LEVELS:
        head += [f"levels {name}: mean", "P50 / P95 / P99"]
    return ReportTable(head, rows).markdown()


def _worth(found: Found) -> str:
    """Returns the break-even price of a static GPU hour, below which the fleet for the peak is cheaper."""
    said = []
    for fleet in (SPOT, BOTH):
        static = _sum(found[PEAK], "usd") - sum(one["machines"]["usd_by"]["reserved"] for one in found[fleet])
        bought = sum(one["machines"]["usd_by"][kind] for one in found[fleet] for kind in ("on_demand", "spot"))
        said.append(f"{100 * bought / static:.0f} % against *{FLEETS[fleet]}*")
    return (
        "Break-even: the fleet for the peak is cheaper only if an hour of a static machine costs less than this share "
        f"of its on-demand price: {'; '.join(said)}."
    )


def _losses(found: Found) -> str:
    rows = []
    for fleet, of in found.items():
        lost, counts = (
            [sum(one["machines"][part][name] for one in of) for name in names]
            for part, names in (
                ("lost_gpu_hours_by", ("work", "eviction", "restart")),
                ("pools", ("launched", "refused", "taken", "ended")),
            )
        )
        rows.append(
            [
                FLEETS[fleet],
                f"{(sum(one['preemptions'] for one in of) - _sum(of, 'interruptions')) / len(of):,.0f}",
                f"{_sum(of, 'interruptions') / len(of):,.0f}",
                *(f"{part / len(of):,.1f}" for part in lost),
                *(f"{count / len(of):,.0f}" for count in counts),
            ]
        )
    head = (
        "fleet", "preemptions", "interruptions", "lost GPU h: repeated work",
        "lost GPU h: saving before an eviction", "lost GPU h: provisioning",
        "machines launched", "launches refused", "reclaimed by their zones", "terminated by their pools",
    )  # fmt: skip
    return ReportTable(head, rows).markdown()


def _chart(axes: Axes, found: Found) -> None:
    """Draws the available and the held GPUs per hour of the first seed; the measured span is in the middle."""
    for k, fleet in enumerate(FLEETS):
        hourly = found[fleet][0]["hourly_gpu_h"]
        there, held = hourly["available_gpu_hours"][:-1], hourly["held_gpu_hours"][:-1]
        axes.step(range(len(there)), there, where="post", label=FLEETS[fleet], color=COLOURS[k], linewidth=1.4)
        axes.step(range(len(held)), held, where="post", color=COLOURS[k], linewidth=0.8, linestyle=":")
    axes.set_ylim(0)
    axes.set_xlabel("hours")
