"""tetris-gap: the gap of climb to the optimum on small instances, and to the best lower bound on larger ones.

There are 50 generated instances of 14 tables on 4 regions (`research.tetris.generate`), whose optimum the exact method
proves. The gap is (climb - optimum) / max(optimum, a hundredth of the start). By default, climb itself proves
plans of this size; the gap of its search without the proof is a separate line.
"""

from collections.abc import Iterator
from statistics import median

from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite
from research.tetris.generate import generate
from tetris import exact
from tetris.climb import climb
from tetris.columns import Columns
from tetris.problem import PlacementProblem

TABLES, REGIONS, SEEDS = 14, 4, 50
_SEARCH_S = 2.0
_EXACT_S = 600.0
_LARGER = (24, 40, 60)
_LARGER_S = 60.0


def _gap(total: float, least: float, columns: Columns) -> float:
    return (total - least) / max(least, 0.01 * PlacementProblem(columns).total)


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the median and worst gaps, with and without the proof, and the gaps to the bounds of larger instances."""
    gaps: list[float] = []
    alone: list[float] = []
    for seed in range(SEEDS):
        bench.say(f"{seed} of {SEEDS} instances")
        columns = generate(TABLES, REGIONS, seed)
        found = climb(columns, time_s=_SEARCH_S, seed=seed)
        searched = climb(columns, time_s=_SEARCH_S, seed=seed, proves=False)
        answer = exact.solve(columns, time_s=_EXACT_S, upper=searched.home)
        if not answer.proved:
            raise InvalidBenchmark(
                f"seed {seed}: {TABLES} tables on {REGIONS} regions: optimum not proved in {_EXACT_S:.0f} s"
            )
        if max(found.lack, searched.lack) > answer.excess + 1e-9:
            raise InvalidBenchmark(f"seed {seed}: climb's plan exceeds the limits by more than the optimum does")
        gaps.append(_gap(found.total, answer.total, columns))
        alone.append(_gap(searched.total, answer.total, columns))
    sizes = {"tables": TABLES, "regions": REGIONS, "instances": SEEDS}
    for name, values in (("gap", gaps), ("gap of the search alone", alone)):
        for word, figure in (("median", median(values)), ("worst", max(values))):
            amounts = {"zero": float(sum(v <= 1e-9 for v in values)), "search_s": _SEARCH_S}
            yield Figure(SUITE.name, SUITE.line(f"{name}, {word}"), figure, amounts, 1, sizes)
    for tables in _LARGER:
        bench.say(f"{tables} tables")
        columns = generate(tables, REGIONS, 1)
        found = climb(columns, time_s=10.0, proves=False)
        answer = exact.solve(columns, time_s=_LARGER_S, upper=found.home)
        amounts = {"total": found.total, "bound": answer.bound, "proved": float(answer.proved), "exact_s": _LARGER_S}
        gap = _gap(found.total, answer.bound, columns)
        yield Figure(
            SUITE.name, SUITE.line(f"gap to the bound, {tables} tables"), gap, amounts, 1,
            {"tables": tables, "regions": REGIONS},
        )  # fmt: skip


SUITE = Suite(
    "tetris-gap",
    (
        Line("gap, median", 0.01),
        Line("gap, worst", 0.03),
        Line("gap of the search alone, median", None),
        Line("gap of the search alone, worst", None),
        *(Line(f"gap to the bound, {tables} tables", None) for tables in _LARGER),
    ),
    run,
)
