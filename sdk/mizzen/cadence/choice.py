"""Chooses an interval between saves, with the values that it is based on and sentences that explain it."""

from math import floor, isfinite
from typing import Literal, NamedTuple, TypeAlias

from mizzen.cadence.formula import (
    best_interval_s,
    best_until_end,
    check_above_zero,
    check_not_negative,
    expected_time,
    expected_time_until_end,
    whole_steps,
)
from mizzen.cadence.interruptions import Mtbf

Rule: TypeAlias = Literal["told", "site", "young", "daly", "mtbf", "write", "end"]


class Choice(NamedTuple):
    """A chosen interval between saves, with the reasons."""

    mtbf: Mtbf
    save_s: float
    """C: the time that a save costs the training."""
    save_why: str
    """The source of `save_s`, as the end of a sentence."""
    write_s: float
    """How long a save is written in the background before it is durable; 0 if the training waits for it."""
    step_s: float | None
    """The time of a step; None: no step was measured yet."""
    interval_s: float
    """W: seconds of work between two saves."""
    rule: Rule
    """How W was determined.

    `told`: the scheduler or the user set it. `site`: a limit that the coordinator of the site computed replaces the
    interval of the formula (`interval_file`).
    `young`, `daly`: by that formula. `mtbf`: W is mu, because a save takes longer than 2 mu. `write`: W is the time of
    the write in the background, because the formula gives less. `end`: W divides the time until the known end of the
    machines.
    """
    steps: int
    """W in whole steps, rounded down, at least 1."""
    ends_in_s: float | None = None
    """L: the time until the last save must be durable; None: the end of the machines is not known."""
    saves: int | None = None
    """The number of saves by which the interval divides L; None: the interval does not divide L."""

    @property
    def durable_s(self) -> float:
        """The time from the start of a save until it is durable. The grace after a notice must not be shorter."""
        return self.save_s + self.write_s

    @property
    def overhead(self) -> float:
        """Expected extra time for each second of work: saves and lost work, without restarts."""
        worked_s = self.interval_s if self.step_s is None else self.steps * self.step_s
        if not worked_s > 0:
            return float("inf")
        if self.ends_in_s is not None and self.saves is not None:
            left_s = self.ends_in_s - self.write_s
            return expected_time_until_end(self.mtbf.mtbf_s, self.save_s, worked_s, left_s) - 1
        return expected_time(self.mtbf.mtbf_s, self.save_s, worked_s) - 1 + self.write_s / self.mtbf.mtbf_s

    def sentences(self) -> tuple[str, ...]:
        """Return one sentence each about mu, C, W, the steps and the expected overhead."""
        mu_s, c_s = self.mtbf.mtbf_s, self.save_s
        forms = {
            "told": f"The interval was set: {_s(self.interval_s)}.",
            "site": f"The coordinator of the site computed the interval: {_s(self.interval_s)}.",
            "young": f"Young: sqrt(2 * {_s(mu_s)} * {_s(c_s)}) = {_s(self.interval_s)} of work between two saves.",
            "daly": f"Daly, because that is {c_s / mu_s:.1%} of the mean time between interruptions: "
            f"{_s(self.interval_s)} of work between two saves.",
            "mtbf": "A save takes longer than two mean times between interruptions, so the interval is one mean time: "
            f"{_s(self.interval_s)}.",
            "end": f"{_saves(self.saves)} until the end in {_s(self.ends_in_s or 0)}: "
            f"{_s(self.interval_s)} of work for each.",
            "write": f"A save is written in the background for {_s(self.write_s)}, and the next one waits for it, "
            f"so the interval is {_s(self.interval_s)}.",
        }
        if self.step_s is None:
            steps = "No step was timed yet."
        elif self.steps * self.step_s > self.interval_s * (1 + 1e-9):
            steps = f"One step takes {_s(self.step_s)}, longer than the interval: every step is saved."
        else:
            steps = f"At {_s(self.step_s)} a step these are {self.steps} whole steps, {_s(self.steps * self.step_s)}."
        waste = self.overhead
        cost = (
            f"takes {waste:.1%} more time than without interruptions and saves"
            if isfinite(waste) and waste < 100
            else "will hardly ever end"
        )
        return (
            f"The gang is interrupted every {_s(mu_s)} on average, {self.mtbf.why}.",
            f"A save costs the training {_s(c_s)}, {self.save_why}.",
            forms[self.rule],
            steps,
            f"With these values the work {cost}, not counting restarts.",
        )


def choose(
    mtbf: Mtbf,
    save_s: float,
    step_s: float | None,
    *,
    interval_s: float | None = None,
    write_s: float = 0.0,
    save_why: str = "as given",
    ends_in_s: float | None = None,
    site_interval_s: float | None = None,
) -> Choice:
    """Choose the interval for these values.

    Args:
        mtbf: mean time between interruptions of the gang.
        save_s: the time that a save costs the training, 0 or more seconds.
        step_s: the time of a step, more than 0 seconds; None: not known, and `steps` is 1.
        interval_s: a fixed interval, 0 or more seconds; it takes precedence over the formula.
        write_s: how long a save is written in the background; the interval is not shorter.
        save_why: the source of `save_s`, as the end of a sentence.
        ends_in_s: the time until the machines certainly end, more than 0 seconds; None: not known. The interval divides
            this time, so that the last save is durable at the end. `mtbf` then counts only earlier interruptions.
        site_interval_s: the limit of the coordinator of the site that replaces the interval of the formula, 0 or more
            seconds; `interval_s` takes precedence over it.

    Raises:
        ValueError: a number is out of its range. The message names it.
    """
    check_above_zero(step_s=step_s, ends_in_s=ends_in_s)
    check_not_negative(write_s=write_s, interval_s=interval_s, site_interval_s=site_interval_s)
    rule: Rule
    saves = None
    best_s, rule = best_interval_s(mtbf.mtbf_s, save_s)
    if interval_s is not None:
        best_s, rule = interval_s, "told"
    elif site_interval_s is not None:
        best_s, rule = site_interval_s, "site"
    else:
        if write_s > best_s:
            best_s, rule = write_s, "write"
        divided = ends_in_s and _divided(mtbf.mtbf_s, save_s, write_s, ends_in_s)
        if divided:
            best_s, saves, rule = *divided, "end"
    steps = 1 if step_s is None else whole_steps(best_s, step_s)
    return Choice(mtbf, save_s, save_why, write_s, step_s, best_s, rule, steps, ends_in_s, saves)


def _divided(mtbf_s: float, save_s: float, write_s: float, ends_in_s: float) -> tuple[float, int] | None:
    """Return the interval and the number of saves until a known end; None: no save fits, or saves cost nothing."""
    left_s = ends_in_s - write_s
    if not 0 < save_s < left_s:
        return None
    interval_s, saves = best_until_end(mtbf_s, save_s, left_s)
    if not saves:
        return None
    if interval_s < write_s:
        saves = max(1, floor(left_s / (write_s + save_s)))
        interval_s = left_s / saves - save_s
    return interval_s, saves


def _saves(number: int | None) -> str:
    return "One save is best" if number == 1 else f"{number} saves are best"


def _s(seconds: float) -> str:
    """Format seconds as `805 s`, `0.25 s` or `86,400 s`."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
