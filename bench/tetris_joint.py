"""tetris-joint: homes and replicas decided together (`tetris.joint`) beside homes first and replicas then (MAST 6, 3.5).

Generated instances, with storage as generated (the homes fill 40 % of it at the start) and with so little that they fill
70 %. Both ways are scored by `tetris.aims`: the gap is (two steps - together) / together. Together begins with the plan
of the two steps, so it is never worse; what it gains by deciding the replicas anew for the same homes is told apart.
The two steps fill the storage with hot tables: their default leaves half of it.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median

import numpy as np

from bench.harness import Bench, Figure, Line, Suite
from tetris.aims import Worth
from tetris.columns import Columns
from tetris.generate import generate
from tetris.joint import together, two_step

SIZES = ((14, 4, 20), (60, 6, 5))
"""Tables, regions, seeds."""
FILLED = (0.4, 0.7)
_SEARCH_S = 2.0
_EFFORT_S = 12.0
_TERMS = ("read", "gpu", "storage", "nowhere", "recovery", "reach")


def filled(columns: Columns, part: float) -> Columns:
    """The same with storage of which the homes fill that part, but for regions where they need more."""
    stored = np.bincount(columns.home, weights=columns.size_bytes, minlength=len(columns.regions))
    share = columns.capacity_bytes / columns.capacity_bytes.sum()
    return replace(columns, capacity_bytes=np.maximum(np.round(share * stored.sum() / part), stored))


def run(bench: Bench) -> Iterator[Figure]:
    """For each size and amount of storage, the gap's median and worst, and what is left of it with the homes kept."""
    for tables, regions, seeds in SIZES:
        for part in FILLED:
            gaps: list[float] = []
            kept: list[float] = []
            ways: dict[str, list[Worth]] = {"two": [], "together": []}
            for seed in range(seeds):
                bench.say(f"{tables} tables, {part:.0%} filled: {seed} of {seeds}")
                columns = filled(generate(tables, regions, seed), part)
                two = two_step(columns, time_s=_SEARCH_S, seed=seed)
                alone = together(columns, two, effort_s=_EFFORT_S, seed=seed, moves=False)
                both = together(columns, two, effort_s=_EFFORT_S, seed=seed)
                gaps.append(two.worth.total / both.worth.total - 1.0)
                kept.append(alone.worth.total / both.worth.total - 1.0)
                ways["two"].append(two.worth)
                ways["together"].append(both.worth)
            amounts = {
                f"{way}_{term}": mean(getattr(one, term) for one in found)
                for way, found in ways.items()
                for term in (*_TERMS, "total")
            }
            sizes = {"tables": tables, "regions": regions, "instances": seeds, "effort_s": _EFFORT_S}
            where = f"{tables} tables, {part:.0%} filled"
            for word, value in (("median", median(gaps)), ("worst", max(gaps)), ("homes kept, worst", max(kept))):
                yield Figure(SUITE.name, SUITE.line(f"{where}: gap, {word}"), value, amounts, seeds, sizes)


SUITE = Suite(
    "tetris-joint",
    tuple(
        Line(f"{tables} tables, {part:.0%} filled: gap, {word}", None)
        for tables, _, _ in SIZES
        for part in FILLED
        for word in ("median", "worst", "homes kept, worst")
    ),
    run,
)
