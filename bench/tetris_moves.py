"""tetris-moves: the time to find a table's best region, on 1,000,000 tables, 30 regions, 10,000,000 edges (MAST 3.4).

It is compared with numpy on the table's jobs, for all regions at once (`bench.tetris_numpy`), and with a compiled
recomputation of the whole plan for each other region. All methods use the same random tables. Afterwards, a search of
300 s shows the objective over time, relative to the result of the paper's first pass.
"""

from collections.abc import Iterator

import numpy as np

from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians, timed
from bench.tetris_numpy import Numpy
from research.tetris.generate import generate
from tetris.climb import LACKING, SearchStep, climb, one_pass
from tetris.kernels import search
from tetris.kernels.moves import recompute
from tetris.problem import PlacementProblem

TABLES, REGIONS = 1_000_000, 30
SHARED = 1.46
"""Factor on the jobs per table of MAST's shape, which results in ten edges per table."""
_WEIGHED = 20_000
_BY_NUMPY = 200
_SEARCH_S = 300.0
_CHECKED = 50


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields two figures of speed and those of the objective over time."""
    bench.say(f"generating {TABLES:,} tables")
    columns = generate(TABLES, REGIONS, seed=1, jobs_of_table=SHARED)
    edges = len(columns.job_table)
    sizes = {"tables": TABLES, "regions": REGIONS, "jobs": len(columns.kind), "edges": edges}
    problem = PlacementProblem(columns)
    plain = Numpy(problem)
    parts = problem.fixed, problem.state, problem.work
    tables = np.random.default_rng(3).integers(TABLES, size=_WEIGHED).astype(np.int32)
    spent, gain = np.zeros(search.N_TALLY), np.zeros(_WEIGHED)
    for table in tables[:_CHECKED]:
        weighed = problem.weigh(int(table)).total
        if abs(plain.best(int(table))[1] - weighed.min()) > 1e-9:
            raise InvalidBenchmark(f"table {table}: numpy and the compiled moves have different results")

    def compiled() -> None:
        search.rank(*parts, tables, LACKING * problem.magnitude, spent, gain)

    def by_numpy() -> None:
        for table in tables[:_BY_NUMPY]:
            plain.best(int(table))

    found = medians(
        interleave(
            bench,
            {
                "compiled_s": lambda: timed(compiled)() / _WEIGHED,
                "numpy_s": lambda: timed(by_numpy)() / _BY_NUMPY,
                "anew_s": lambda: timed(lambda: recompute(*parts))() * (REGIONS - 1),
            },
        )
    )
    line = SUITE.line
    yield Figure(
        SUITE.name, line("over numpy on the affected jobs"), found["numpy_s"] / found["compiled_s"], found,
        bench.rounds, sizes,
    )  # fmt: skip
    yield Figure(
        SUITE.name, line("over full recomputation"), found["anew_s"] / found["compiled_s"], found, bench.rounds, sizes
    )
    start = problem.total
    bench.say("the paper's first pass")
    pass_s = timed(lambda: one_pass(problem, spent))()
    first = problem.total

    def say(step: SearchStep) -> None:
        bench.say(f"{step.phase}: {step.time_s:.0f} s, {step.total / first:.3f} of the first pass")

    climbed = climb(columns, time_s=_SEARCH_S, seed=1, listener=say)
    for part in (0.1, 0.25, 0.5, 1.0):
        at_s = part * _SEARCH_S
        total = min((step.total for step in climbed.steps if step.time_s <= at_s), default=start)
        amounts = {"total": total, "first_pass_total": first, "first_pass_s": pass_s, "start_total": start}
        yield Figure(
            SUITE.name, line(f"total after {at_s:.0f} s over the first pass"), total / first, amounts, 1, sizes
        )


SUITE = Suite(
    "tetris-moves",
    (
        Line("over numpy on the affected jobs", 10, at_least=True),
        Line("over full recomputation", 20_000, at_least=True),
        *(Line(f"total after {part * _SEARCH_S:.0f} s over the first pass", None) for part in (0.1, 0.25, 0.5, 1.0)),
    ),
    run,
)
