"""The code that all suites share: lines with bars, interleaved rounds of measurements, and figures."""

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
    """One line of a suite, with the bar for its ratio."""

    name: str
    bar: float | None
    """The ratio that must be reached; None: the line is for information only."""
    at_least: bool = False
    """Whether the ratio must be at least the bar; otherwise at most."""


@dataclass(frozen=True)
class Figure:
    """The result of a line."""

    suite: str
    line: Line
    ratio: float
    absolute: Mapping[str, float]
    """The values behind the ratio, as medians over the rounds; units are in the names."""
    rounds: int
    sizes: Mapping[str, float | str]
    """Sizes of the instance and of the measurement."""

    @property
    def holds(self) -> bool | None:
        """Whether the line reaches its bar; None: it has no bar. NaN reaches no bar."""
        if self.line.bar is None:
            return None
        return self.ratio >= self.line.bar if self.line.at_least else self.ratio <= self.line.bar

    def to_json(self) -> str:
        """Returns the figure as one line of JSON."""
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
    """Rounds to four significant digits; returns None for infinity and NaN, which JSON does not have."""
    if not np.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")


@dataclass(frozen=True)
class Bench:
    """The arguments of a suite's run."""

    rounds: int
    say: Say
    """Reports progress."""


@dataclass(frozen=True)
class Suite:
    """One suite: its lines, and the function that measures them."""

    name: str
    lines: tuple[Line, ...]
    run: Callable[[Bench], Iterable[Figure]]

    def line(self, name: str) -> Line:
        """Returns the line with a name."""
        return next(line for line in self.lines if line.name == name)


class InvalidBenchmark(Exception):
    """The instance does not have the properties that the suite requires, or a run did not have the expected result."""


@contextmanager
def collector_off() -> Iterator[None]:
    """Disables the garbage collector, as `timeit` does."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def seconds(function: Callable[[], object]) -> float:
    """Returns the seconds of one call, with the garbage collector off."""
    with collector_off():
        start_s = time.perf_counter()
        function()
        return time.perf_counter() - start_s


def timed(function: Callable[[], object], times: int = 1) -> Callable[[], float]:
    """Returns a function that calls `function` `times` times, and returns the mean seconds of a call.

    Use many calls for a function that takes only milliseconds, because the time of one call varies.
    """

    def calls() -> None:
        for _ in range(times):
            function()

    return lambda: seconds(calls) / times


Measured = Callable[[], "float | Mapping[str, float]"]


def interleave(bench: Bench, things: Mapping[str, Measured], *, warm_ups: int = 1) -> dict[str, list[float]]:
    """Calls each of `things` once in every round, in their order (A B A B), and returns their values by round.

    A function that measures several values returns a mapping, whose names are used instead of its own. The first
    `warm_ups` rounds do not count.
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
    """Returns the median of each list."""
    return {name: float(median(found)) for name, found in values.items()}


def exponent(sizes: Iterable[float], times: Iterable[float]) -> float:
    """Returns the exponent of a power law, fitted by least squares: the slope of log time over log size."""
    slope, _ = np.polyfit(np.log(np.array(list(sizes), float)), np.log(np.array(list(times), float)), 1)
    return float(slope)


def missing(suites: Iterable[Suite], figures: Iterable[Figure]) -> Iterator[str]:
    """Yields the lines without a figure, as `suite: line`."""
    there = {(f.suite, f.line.name) for f in figures}
    return (f"{s.name}: {line.name}" for s in suites for line in s.lines if (s.name, line.name) not in there)
