"""Draws the pictures of docs/experiments.md: each policy's misses by load, and its waits."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from infra.reports.charts import COLOURS, panels
from research.experiments.cases import BEFORE, BY_TENANT, HIGH_LEVELS, LOADS, MIXED, POLICIES, TRACES
from research.experiments.summary import PolicyResult, misses

_NAMES = (*POLICIES, BEFORE)
_SAYS = {MIXED: "levels drawn", BY_TENANT: "levels by tenant"}


def draw(found: Sequence[PolicyResult], folder: Path) -> list[str]:
    """Writes the pictures as SVG files into a folder; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {(t, v): [o for o in found if (o.case.trace, o.case.variant) == (t, v)] for v in _SAYS for t in TRACES}
    shown = {f"{trace}, {_SAYS[variant]}": here for (trace, variant), here in parts.items() if here}
    pictures = {"misses": _misses, "waits": _waits} if shown else {}
    for name, one in pictures.items():
        charts = {title: partial(one, here=here) for title, here in shown.items()}
        (folder / f"{name}.svg").write_text(panels(charts, 3.2))
    return list(pictures)


def _misses(axes: Axes, here: Sequence[PolicyResult]) -> None:
    """Draws the avoidable misses of levels 1 and 2 until running, as a group of bars for each load."""
    width = 0.8 / len(_NAMES)
    for k, policy in enumerate(_NAMES):
        mine = [[o for o in here if o.policy == policy and o.case.load == load] for load in LOADS]
        heights = [misses(of, "start", avoidable=True).percent for of in mine]
        at = np.arange(len(LOADS)) + (k - (len(_NAMES) - 1) / 2) * width
        axes.bar(at, heights, width * 0.9, label=policy, color=COLOURS[k])
    axes.set_xticks(range(len(LOADS)), [f"load {load:g}" for load in LOADS])
    axes.set_ylabel("levels 1, 2: avoidable misses, %")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_ylim(0, 100)


def _waits(axes: Axes, here: Sequence[PolicyResult]) -> None:
    """Draws the distribution of waits of levels 1 and 2 until running, at load 1."""
    for k, policy in enumerate(_NAMES):
        waits = sorted(
            wait.wait_s
            for o in here
            if o.policy == policy and o.case.load == 1.0
            for wait in o.waits("start")
            if wait.level in HIGH_LEVELS
        )
        if waits:
            # Limit the points to what the logarithmic axis can show, to keep the file small.
            longer = np.unique(np.geomspace(1, len(waits), 400).astype(int))[::-1]
            share = 100 * longer / len(waits)
            axes.step(
                np.maximum(np.asarray(waits)[len(waits) - longer], 1.0),
                share,
                where="post",
                label=policy,
                color=COLOURS[k],
                linewidth=1.3,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.1, 100)
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_xticks([60, 300, 3600, 36000], ["1 min", "5 min", "1 h", "10 h"])
    axes.set_ylabel("levels 1, 2: % that wait longer, load 1")
