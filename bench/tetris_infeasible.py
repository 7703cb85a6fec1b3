"""tetris-infeasible: the gap of climb to the optimum where the start violates a limit (`bench.infeasible`).

There are 60 instances whose optimum the exact method proves within 20 s; instances that it does not prove are left out.
Climb gets 3 s of CPU time for each of three seeds. The gap is (climb - optimum) / optimum. A plan that exceeds the
limits by more than the optimum does has an infinite gap.
"""

import math
from collections.abc import Iterator
from statistics import median
from time import process_time

from bench.harness import Bench, Figure, Line, Suite
from bench.infeasible import infeasible
from tetris import exact
from tetris.climb import climb, load
from tetris.columns import Columns

INSTANCES, SEEDS = 60, 3
SEARCH_S, _EXACT_S, _UPPER_S = 3.0, 20.0, 1.0
_ROUNDING = 1e-9


def optimum(columns: Columns) -> exact.ExactAnswer | None:
    """Returns the proved optimum; None: it is not proved in `_EXACT_S` seconds of CPU time."""
    began_s = process_time()
    upper = climb(columns, time_s=_UPPER_S, seed=SEEDS, proves=False).home
    answer = exact.solve(columns, time_s=max(0.0, began_s + _EXACT_S - process_time()), upper=upper)
    return answer if answer.proved else None


def gap(columns: Columns, least: exact.ExactAnswer, seed: int) -> float:
    """Returns the gap of climb's plan."""
    found = climb(columns, time_s=SEARCH_S, seed=seed)
    return math.inf if found.lack > least.excess + _ROUNDING else found.total / least.total - 1


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the median and the worst gap."""
    load()
    gaps: list[float] = []
    seed = done = 0
    while done < INSTANCES:
        columns, seed = infeasible(seed), seed + 1
        least = optimum(columns)
        if least is None:
            continue
        own = [gap(columns, least, number) for number in range(SEEDS)]
        gaps += own
        done += 1
        shown = ", ".join(f"{value:.2%}" for value in own)
        best = f"optimum {least.excess!r}, {least.total!r}"
        bench.say(f"instance {done} of {INSTANCES} (number {seed - 1}, {best}): {shown}")
    sizes = {"instances": INSTANCES, "left_out": seed - INSTANCES, "seeds": SEEDS}
    for word, figure in (("median", median(gaps)), ("worst", max(gaps))):
        amounts = {"zero": float(sum(value <= _ROUNDING for value in gaps)), "search_s": SEARCH_S}
        yield Figure(SUITE.name, SUITE.line(f"gap, {word}"), figure, amounts, 1, sizes)


SUITE = Suite("tetris-infeasible", (Line("gap, median", 0.01), Line("gap, worst", 0.03)), run)
