"""tetris-joint: homes and replicas decided together (`bench.joint_model`), against homes first, then replicas (MAST 6).

The instances are generated, with 14 tables on 4 regions. Homes fill 40 % of the storage at the start (as generated), or
70 %. Both methods are scored by `bench.replica_objective`: the gap is (two steps - together) / together. The joint
search starts from the plan of the two steps, so it is never worse. A separate line shows the gap if the homes are kept
and only the replicas are improved. Here the two steps may fill the storage with hot tables; by default they leave half
of it free.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median

import numpy as np

from bench.harness import Bench, Figure, Line, Suite
from bench.joint_model import together, two_step
from bench.replica_objective import ReplicaCost
from research.tetris.generate import generate
from tetris.columns import Columns

TABLES, REGIONS, SEEDS = 14, 4, 10
FILLED = (0.4, 0.7)
_SEARCH_S = 2.0
_EFFORT_S = 3.0
_WORDS = {"gap, median": 0.02, "gap, worst": None, "gap with the homes kept, worst": None}
"""Bar of each line. `solve` decides in two steps, so the median gap should be small."""
_TERMS = ("read", "gpu", "storage", "nowhere", "recovery", "reach")


def filled(columns: Columns, part: float) -> Columns:
    """Returns the instance with storage of which the homes fill `part`; a region has at least room for its homes."""
    stored = np.bincount(columns.home, weights=columns.size_bytes, minlength=len(columns.regions))
    share = columns.capacity_bytes / columns.capacity_bytes.sum()
    return replace(columns, capacity_bytes=np.maximum(np.round(share * stored.sum() / part), stored))


def run(bench: Bench) -> Iterator[Figure]:
    """Yields, for each amount of storage, the median and the worst gap, and the worst gap with the homes kept."""
    for part in FILLED:
        gaps: list[float] = []
        kept: list[float] = []
        ways: dict[str, list[ReplicaCost]] = {"two": [], "together": []}
        for seed in range(SEEDS):
            bench.say(f"{part:.0%} filled: {seed} of {SEEDS} instances")
            columns = filled(generate(TABLES, REGIONS, seed), part)
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
        sizes = {"tables": TABLES, "regions": REGIONS, "instances": SEEDS, "effort_s": _EFFORT_S}
        for word, value in zip(_WORDS, (median(gaps), max(gaps), max(kept)), strict=True):
            yield Figure(SUITE.name, SUITE.line(f"{part:.0%} filled: {word}"), value, amounts, SEEDS, sizes)


SUITE = Suite(
    "tetris-joint",
    tuple(Line(f"{part:.0%} filled: {word}", bar) for part in FILLED for word, bar in _WORDS.items()),
    run,
)
