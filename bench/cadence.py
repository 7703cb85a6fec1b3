"""cadence: the cost of interruptions and saves at the chosen interval, against the best fixed interval.

Both intervals are simulated on the same failures. A gang works in steps of 2 s until it is interrupted, and resumes at
once from its last save; a save blocks it. The cases are three mean times between interruptions and three save times,
each with 20,000 interruptions, which are drawn again in every round (from an exponential distribution for the lines
with a bar). The ratio is that of the waste: all time minus the saved work. The best interval, in whole steps, is
searched on the same draws: on a grid from a tenth to ten times the chosen interval, then on a finer grid around the
best. Restarts take no time, because they would only reduce differences. The absolute values also contain intervals of
10 and 30 minutes, and no saves, where 24 hours of work must be done without an interruption (null: this never happens
in the draws). They are hours for 24 hours of work. The ratio of the total times is shown too.

The Weibull lines have up-times with shape 0.7 and the same mean: failures are more likely soon after a restart, which
the formula does not model. `live` uses the object that a `Checkpointer` holds, on a simulated clock. It is created
after every interruption without knowledge of the save time. Save times vary (lognormal, the first one five times as
long), and the mean time between interruptions is 3 hours. The best fixed interval has the same failures and the same
distribution of save times.

`should_save` is timed in steps where neither a save nor a reading of the clock is due, against a call of a Python
function that returns False, in turns. The absolute values also contain the mean over 100,000 consecutive steps,
including readings of the clock.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from math import exp, gamma, inf
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.harness import Bench, Figure, Line, Suite, interleave, medians, seconds
from mizzen.cadence import Cadence, choose, mtbf

STEP_S = 2.0
FAILURES = 20_000
JOB_S = 24 * 3600.0
MTBFS = {"20 min": 1200.0, "3 h": 10_800.0, "24 h": 86_400.0}
SAVES_S = (2.0, 30.0, 300.0)
SHAPE = 0.7
BAR = 1.02
LIVE_STEP_S, LIVE_FAILURES, LIVE_MTBF_S, LIVE_SAVE_S = 10.0, 1000, 10_800.0, 30.0
CALLS, IN_A_ROW = 200_000, 100_000
WEIBULL_SAVE_S = 30.0

Floats = NDArray[np.float64]


def up_times(rng: np.random.Generator, mtbf_s: float, shape: float, failures: int = FAILURES) -> Floats:
    """Draws seconds from a restart to the next interruption: Weibull with mean `mtbf_s`; shape 1 is exponential."""
    return rng.weibull(shape, failures) * (mtbf_s / gamma(1 + 1 / shape))


def time_per_work(up_s: Floats, save_s: float, steps: int) -> float:
    """Returns the total time per second of saved work, with a save every `steps` steps; infinity: nothing is saved."""
    work_s = steps * STEP_S
    done_s = float(np.floor(up_s / (work_s + save_s)).sum()) * work_s
    return float(up_s.sum()) / done_s if done_s else inf


def without_saves(up_s: Floats, job_s: float = JOB_S) -> float:
    """Returns the total time per second of a job that must run without interruption; infinity: it never finishes."""
    done = int((up_s >= job_s).sum())
    return (float(up_s[up_s < job_s].sum()) / done + job_s) / job_s if done else inf


def best(cost: Callable[[int], float], near: int) -> tuple[float, int]:
    """Returns the lowest cost and its steps: from a geometric grid around `near`, then a finer grid around the best."""
    tried = {
        int(k): cost(int(k)) for k in np.unique(np.geomspace(max(1, near / 10), max(40, near * 10), 61).astype(int))
    }
    found = min(tried, key=lambda k: tried[k])
    for k in np.unique(np.linspace(max(1, found * 0.9), found * 1.1 + 2, 81).astype(int)):
        tried.setdefault(int(k), cost(int(k)))
    found = min(tried, key=lambda k: tried[k])
    return tried[found], found


def case(up_s: Floats, mtbf_s: float, save_s: float) -> dict[str, float]:
    """Returns the values of one round of a line."""
    choice = choose(mtbf(gang_mtbf_s=mtbf_s), save_s, STEP_S)
    least, steps = best(lambda k: time_per_work(up_s, save_s, k), choice.steps)
    hours = JOB_S / 3600
    return {
        "chosen_h": hours * time_per_work(up_s, save_s, choice.steps),
        "best_h": hours * least,
        "ten_minutes_h": hours * time_per_work(up_s, save_s, int(600 / STEP_S)),
        "thirty_minutes_h": hours * time_per_work(up_s, save_s, int(1800 / STEP_S)),
        "none_h": hours * without_saves(up_s),
        "chosen_s": choice.steps * STEP_S,
        "best_s": steps * STEP_S,
    }


def _figure(bench: Bench, line: str, rounds: list[Mapping[str, float]], sizes: Mapping[str, float | str]) -> Figure:
    found = medians({name: [one[name] for one in rounds] for name in rounds[0]})
    job_h = JOB_S / 3600
    ratio = median((one["chosen_h"] - job_h) / (one["best_h"] - job_h) for one in rounds)
    found["time_ratio"] = median(one["chosen_h"] / one["best_h"] for one in rounds)
    return Figure(SUITE.name, SUITE.line(line), ratio, found, bench.rounds, sizes)


def _name(mtbf_name: str, save_s: float, shape: float) -> str:
    return f"{'' if shape == 1 else 'weibull, '}every {mtbf_name}, save {save_s:g} s"


def _cases() -> Iterator[tuple[str, float, float, float]]:
    for name, mtbf_s in MTBFS.items():
        for save_s in SAVES_S:
            yield _name(name, save_s, 1.0), mtbf_s, save_s, 1.0
    for name, mtbf_s in MTBFS.items():
        yield _name(name, WEIBULL_SAVE_S, SHAPE), mtbf_s, WEIBULL_SAVE_S, SHAPE


def _saves(rng: np.random.Generator) -> Iterator[float]:
    """Yields save times after a restart: lognormal with mean `LIVE_SAVE_S`, the first one five times as long."""
    factor = 5.0
    while True:
        yield factor * LIVE_SAVE_S * exp(float(rng.normal(0, 0.5)) - 0.125)
        factor = 1.0


def live(rng: np.random.Generator, up_s: Floats) -> float:
    """Runs a training that is interrupted after each of the times `up_s` and restarts with a new `Cadence`.

    Returns the time that passes per second of work that was saved, as a ratio of at least 1.
    """
    done_s, told = 0.0, mtbf(gang_mtbf_s=LIVE_MTBF_S)
    for up in up_s:
        now_s, saved, saves = 0.0, 0, _saves(rng)
        cadence = Cadence(told, clock=lambda: now_s)  # noqa: B023  # It is called only in this iteration.
        cadence.begin(0)
        for step in count(1):
            now_s += LIVE_STEP_S
            if cadence.should_save(step):
                held_s = next(saves)
                now_s += held_s
                if now_s <= up:
                    saved = step
                cadence.saved(step, held_s)
            if now_s > up:
                break
        done_s += saved * LIVE_STEP_S
    return float(up_s.sum()) / done_s


def fixed(rng: np.random.Generator, up_s: Floats, steps: int) -> float:
    """Returns the total time per second of saved work, with a save every `steps` steps."""
    done_s, work_s = 0.0, steps * LIVE_STEP_S
    for up in up_s:
        now_s, saves = 0.0, _saves(rng)
        while (now_s := now_s + work_s + next(saves)) <= up:
            done_s += work_s
    return float(up_s.sum()) / done_s if done_s else inf


def live_round(seed: int) -> dict[str, float]:
    """Returns the values of one round of the line `live`."""
    up_s = up_times(np.random.default_rng(seed), LIVE_MTBF_S, 1.0, LIVE_FAILURES)
    near = choose(mtbf(gang_mtbf_s=LIVE_MTBF_S), LIVE_SAVE_S, LIVE_STEP_S).steps
    grid = np.unique(np.geomspace(near / 3, near * 3, 25).astype(int))
    costs = {int(k): fixed(np.random.default_rng(seed + 1), up_s, int(k)) for k in grid}
    steps = min(costs, key=lambda k: costs[k])
    chosen, hours = live(np.random.default_rng(seed + 1), up_s), JOB_S / 3600
    return {"chosen_h": hours * chosen, "best_h": hours * costs[steps], "best_s": steps * LIVE_STEP_S}


def _bare(_: int) -> bool:
    return False


def _each_ns(function: Callable[[int], object], steps: range, times: int = 1) -> float:
    """Returns nanoseconds per `function(step)`, over all `steps` repeated `times` times, including the loop."""

    def calls() -> None:
        for _ in range(times):
            for step in steps:
                function(step)

    return 1e9 * seconds(calls) / (times * len(steps))


def question(bench: Bench) -> Figure:
    """Measures the line `should_save`."""
    still = Cadence(mtbf(gang_mtbf_s=LIVE_MTBF_S), clock=lambda: 0.0)
    still.begin(0)
    still.should_save(1)
    # The clock was read at step 1 and is read again ten steps later: nothing is due between them.
    between = range(2, 10)

    def in_a_row() -> float:
        cadence = Cadence(mtbf(gang_mtbf_s=LIVE_MTBF_S))
        cadence.begin(0)
        return _each_ns(cadence.should_save, range(1, IN_A_ROW + 1))

    things = {
        "should_save_ns": lambda: _each_ns(still.should_save, between, CALLS // len(between)),
        "bare_call_ns": lambda: _each_ns(_bare, between, CALLS // len(between)),
        "with_looks_ns": in_a_row,
    }
    found = medians(interleave(bench, things))
    ratio = found["should_save_ns"] / found["bare_call_ns"]
    return Figure(SUITE.name, SUITE.line("should_save"), ratio, found, bench.rounds, {"calls": CALLS})


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields the figures of all lines."""
    for number, (line, mtbf_s, save_s, shape) in enumerate(_cases()):
        bench.say(line)
        rngs = (np.random.default_rng((number, turn)) for turn in range(bench.rounds))
        rounds = [case(up_times(rng, mtbf_s, shape), mtbf_s, save_s) for rng in rngs]
        sizes = {"mtbf_s": mtbf_s, "save_s": save_s, "step_s": STEP_S, "failures": FAILURES, "shape": shape}
        yield _figure(bench, line, list(rounds), sizes)
    bench.say("live")
    sizes = {"mtbf_s": LIVE_MTBF_S, "save_s": LIVE_SAVE_S, "step_s": LIVE_STEP_S, "failures": LIVE_FAILURES}
    yield _figure(bench, "live", [live_round(100 + 2 * turn) for turn in range(bench.rounds)], sizes)
    yield question(bench)


SUITE = Suite(
    "cadence",
    (
        *(Line(line, BAR if shape == 1 else None) for line, _, _, shape in _cases()),
        Line("live", None),
        Line("should_save", None),
    ),
    run,
)
