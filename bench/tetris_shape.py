"""tetris-shape: plans of V0, V1 and V2 on instances with MAST's shape, with the metrics of MAST 5.6.

The metrics are, over all GPU types: the largest ratio of high-priority demand to supply of a region, the standard
deviation of this ratio over regions, the GPU hours that train at home compared with V0, and the fraction of the
high-priority GPU hours whose job has all its data in one region. Figures are medians over seeds.
"""

from collections.abc import Iterator
from statistics import median

import numpy as np

from bench.harness import Bench, Figure, Line, Suite
from domain.instance import HIGH_PRIORITY
from research.tetris.generate import generate
from research.tetris.versions import v1
from tetris.climb import climb
from tetris.columns import NONE, Columns, Ints
from tetris.kernels.layout import ROUNDING
from tetris.problem import PlacementProblem

TABLES, REGIONS, SEEDS = 20_000, 10, 3
_SEARCH_S = 120.0


def figures(columns: Columns, home: Ints) -> dict[str, float]:
    """Returns the metrics of a plan. Demand is the GPU hours of jobs of priority 1 and 2 that have a region."""
    region = PlacementProblem(columns, home).state.region
    high = (columns.priority <= HIGH_PRIORITY) & (columns.gpu_type != NONE)
    all_h = float(columns.gpu_h[high].sum())
    placed = high & (region != NONE)
    worst, deviation, home_h = 0.0, 0.0, 0.0
    for kind, supply in enumerate(columns.supply_h):
        mine = placed & (columns.gpu_type == kind)
        demand = np.bincount(region[mine], weights=columns.gpu_h[mine], minlength=len(supply))
        has = supply > 0
        ratio = demand[has] / supply[has]
        worst, deviation = max(worst, float(ratio.max())), max(deviation, float(ratio.std()))
        home_h += float(demand[has].sum())
    colocated = float(columns.gpu_h[placed].sum() / all_h)
    return {"worst": worst, "deviation": deviation, "at_home": home_h / all_h, "colocated": colocated}


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of V2; the absolute values include those of V0 and V1."""
    found: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        columns = generate(TABLES, REGIONS, seed)
        homes = {"v0": columns.home}
        for name, search in (("v1", v1), ("v2", climb)):
            bench.say(f"seed {seed}: {name}")
            homes[name] = search(columns, time_s=_SEARCH_S, seed=seed).home
        for name, home in homes.items():
            for key, value in figures(columns, home).items():
                found.setdefault(f"{name}_{key}", []).append(value)
    middle = {key: median(values) for key, values in found.items()}
    sizes = {"tables": TABLES, "regions": REGIONS, "seeds": SEEDS, "search_s": _SEARCH_S}
    for line in SUITE.lines:
        key = line.name.split(":")[0]
        amounts = {name: value for name, value in middle.items() if name.endswith(key)}
        value = middle[f"v2_{key}"]
        if key == "at_home":
            value = value / middle["v0_at_home"] + ROUNDING
        yield Figure(SUITE.name, line, value, amounts, SEEDS, sizes)


SUITE = Suite(
    "tetris-shape",
    (
        Line("worst: demand over supply", 0.98),
        Line("deviation: of demand over supply", 0.30),
        Line("at_home: over V0", 1.0, at_least=True),
        Line("colocated: high-priority GPU hours", 0.96, at_least=True),
    ),
    run,
)
