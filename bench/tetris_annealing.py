"""tetris-annealing: plans of `climb` against those of a simple simulated annealing (`bench.annealing`) in equal time.

There are three instances of each of three shapes: 300 and 2,000 tables with several jobs of both kinds each and tight
CPU quotas (`bench.tetris_dense`), and 2,000 tables with MAST's shape. Both methods get 10 and 60 s of CPU time of their
thread, so that other load does not affect them; compilation does not count. Both start with the instance's homes and
take turns. The ratio is the total of climb's plan divided by that of the annealing: the worst of the three instances,
and their median.
"""

from collections.abc import Callable, Iterator
from statistics import median
from time import thread_time

from bench.annealing import anneal
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite
from bench.tetris_dense import dense
from research.tetris.generate import generate
from tetris.climb import climb, load
from tetris.columns import Columns, Ints
from tetris.problem import PlacementProblem

INSTANCES = 3
_BUDGETS_S = (10.0, 60.0)
_SHAPES: dict[str, Callable[[int], Columns]] = {
    "dense, 300 tables": lambda seed: dense(300, 6, seed),
    "dense, 2,000 tables": lambda seed: dense(2000, 10, seed),
    "MAST's shape, 2,000 tables": lambda seed: generate(2000, 10, seed),
}
_SAME_EXCESS = 1e-8


def compare(columns: Columns, time_s: float, seed: int) -> tuple[float, float]:
    """Returns the totals of climb's plan and of the annealing's plan.

    Raises:
        InvalidBenchmark: a plan breaks a limit that the start keeps, or the plans exceed the limits by different
        amounts.
    """
    (total, lack), (other, lack_of_other) = (_judged(columns, home) for home in _plans(columns, time_s, seed))
    if abs(lack - lack_of_other) > _SAME_EXCESS:
        raise InvalidBenchmark(
            f"seed {seed}: climb's plan exceeds the limits by {lack:.3g}, the annealing's by {lack_of_other:.3g}"
        )
    return total, other


def _plans(columns: Columns, time_s: float, seed: int) -> tuple[Ints, Ints]:
    load(exact=False)
    # `ends_s` stops climb exactly at the time limit, which its effort may exceed by a tenth.
    ends_s = thread_time() + time_s
    ours = climb(columns, time_s=time_s, seed=seed, proves=False, clock=thread_time, ends_s=ends_s).home
    return ours, anneal(columns, time_s=time_s, seed=seed, clock=thread_time)


def _judged(columns: Columns, home: Ints) -> tuple[float, float]:
    problem = PlacementProblem(columns, home)
    lack, broken = problem.excess
    if broken > _SAME_EXCESS:
        raise InvalidBenchmark(f"a plan exceeds limits that the start keeps by {broken:.3g}")
    return problem.total, lack


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the worst and the median ratio of each shape and budget."""
    _plans(dense(20, 3, 0), 0.1, 0)  # Compiles both methods; the plans are not used.
    for shape, instance in _SHAPES.items():
        for time_s in _BUDGETS_S:
            totals: list[tuple[float, float]] = []
            for seed in range(1, INSTANCES + 1):
                bench.say(f"{shape}, {time_s:.0f} s: instance {seed} of {INSTANCES}")
                totals.append(compare(instance(seed), time_s, seed))
            ratios = [ours / theirs for ours, theirs in totals]
            amounts = {f"climb_{n}": ours for n, (ours, _) in enumerate(totals, 1)}
            amounts |= {f"annealing_{n}": theirs for n, (_, theirs) in enumerate(totals, 1)}
            for word, ratio in (("worst", max(ratios)), ("median", median(ratios))):
                line = SUITE.line(_name(shape, time_s, word))
                yield Figure(SUITE.name, line, ratio, amounts, INSTANCES, {"time_s": time_s})


def _name(shape: str, time_s: float, word: str) -> str:
    return f"{shape}, {time_s:.0f} s, {word}"


SUITE = Suite(
    "tetris-annealing",
    tuple(
        Line(_name(shape, time_s, word), bar)
        for shape in _SHAPES
        for time_s in _BUDGETS_S
        for word, bar in (("worst", 1.01), ("median", 1.0))
    ),
    run,
)
