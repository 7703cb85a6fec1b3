"""What all suites share: lines with a bar, rounds in which the things compared take turns, and figures of them."""

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np

ROUNDS = 7
Say = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    """One line of a suite, and the ratio that it must reach."""

    name: str
    bar: float | None
    """None: told for what it tells, without a bar."""
    at_least: bool = False
    """Whether the ratio must be at least the bar; else at most."""


@dataclass(frozen=True)
class Figure:
    """What was measured for a line."""

    suite: str
    line: Line
    ratio: float
    absolute: Mapping[str, float]
    """What the ratio is of, medians over the rounds; units are in the names."""
    rounds: int
    sizes: Mapping[str, float | str]
    """What it was measured on."""

    @property
    def holds(self) -> bool | None:
        """Whether the line reaches its bar; None without one. A ratio that is no number reaches none."""
        if self.line.bar is None:
            return None
        return self.ratio >= self.line.bar if self.line.at_least else self.ratio <= self.line.bar

    def to_json(self) -> str:
        """One line of JSON."""
        body = {
            "suite": self.suite,
            "line": self.line.name,
            "ratio": _short(self.ratio),
            "bar": self.line.bar,
            "bound": None if self.line.bar is None else "at least" if self.line.at_least else "at most",
            "holds": self.holds,
            "absolute": {name: _short(value) for name, value in self.absolute.items()},
            "rounds": self.rounds,
            "sizes": {k: v if isinstance(v, str) else _short(v) for k, v in self.sizes.items()},
        }
        return json.dumps(body)


def _short(value: float) -> float | None:
    """Four digits are more than a measurement has. JSON has no infinity: null."""
    if not np.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")


@dataclass(frozen=True)
class Bench:
    """What a suite is given."""

    rounds: int
    say: Say
    """Takes a line on how far it is."""


@dataclass(frozen=True)
class Suite:
    """One suite: its lines, and what measures them."""

    name: str
    lines: tuple[Line, ...]
    run: Callable[[Bench], Iterable[Figure]]

    def line(self, name: str) -> Line:
        """A line by its name."""
        return next(line for line in self.lines if line.name == name)


class Unfit(Exception):
    """An instance is not what the suite says that it measures on, or a run did not do what is to be measured."""


@contextmanager
def collector_off() -> Iterator[None]:
    """The garbage collector is off, as for `timeit`."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def seconds(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    with collector_off():
        start_s = time.perf_counter()
        function()
        return time.perf_counter() - start_s


def timed(function: Callable[[], object], times: int = 1) -> Callable[[], float]:
    """`function` as one that gives the seconds of its call, on average over `times` calls in a row.

    What takes a millisecond is called many times: one call is a matter of luck.
    """

    def calls() -> None:
        for _ in range(times):
            function()

    return lambda: seconds(calls) / times


Measured = Callable[[], "float | Mapping[str, float]"]


def interleave(bench: Bench, things: Mapping[str, Measured], *, warm_ups: int = 1) -> dict[str, list[float]]:
    """In every round each of `things` once, in their order: A B A B. Their values by round.

    One that measures several values at once gives a mapping; they appear under the names in it. The first `warm_ups`
    rounds do not count.
    """
    out: dict[str, list[float]] = {}
    for number in range(warm_ups + bench.rounds):
        warm_up = number < warm_ups
        bench.say("warm-up" if warm_up else f"round {number - warm_ups + 1} of {bench.rounds}")
        gc.collect()
        for name, thing in things.items():
            value = thing()
            for key, one in value.items() if isinstance(value, Mapping) else [(name, value)]:
                if not warm_up:
                    out.setdefault(key, []).append(one)
    return out


def medians(values: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: float(median(found)) for name, found in values.items()}


def exponent(sizes: Iterable[float], times: Iterable[float]) -> float:
    """The least-squares exponent: the slope of log time over log size."""
    slope, _ = np.polyfit(np.log(np.array(list(sizes), float)), np.log(np.array(list(times), float)), 1)
    return float(slope)


def missing(suites: Iterable[Suite], figures: Iterable[Figure]) -> Iterator[str]:
    """The lines without a figure, as `suite: line`."""
    there = {(f.suite, f.line.name) for f in figures}
    return (f"{s.name}: {line.name}" for s in suites for line in s.lines if (s.name, line.name) not in there)
