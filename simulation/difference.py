"""Compares each policy's figures without and with a change, for what-if runs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from infra.reports.formats import NONE, number, percent, span
from simulation.meter import UNTIL
from simulation.result import PolicyRow, until_key
from simulation.settings import LEVELS

QUOTAS = {"within_quota": "within quota", "over_quota": "over quota"}
DONE = {"award": "awarded", "start": "started"}
"""Text in reports for each event that ends a wait."""
_Figure = tuple[str, Callable[[PolicyRow], Any], Callable[[Any], str]]


def pairs(outcomes: Sequence[PolicyRow]) -> list[tuple[PolicyRow, PolicyRow]]:
    """Returns each policy's (unchanged run, changed run); policies with only one of them are left out."""
    unchanged = {one["policy"]: one for one in outcomes if not one["run"]["change"]}
    return [(unchanged[one["policy"]], one) for one in outcomes if one["run"]["change"] and one["policy"] in unchanged]


def differences(before: PolicyRow, after: PolicyRow) -> list[list[str]]:
    """Returns the rows (policy, figure, before, after, difference) of the main figures, and of the figures by priority
    that differ.
    """
    by_priority = (
        _row(before, after, figure)
        for quota, title in QUOTAS.items()
        for level in map(str, LEVELS)
        for until in UNTIL
        for figure in _judged(until, quota, level, f"{title}, priority {level}")
    )
    return [*(_row(before, after, one) for one in _main()), *(row for row in by_priority if row[-1] != "same")]


def _main() -> Iterator[_Figure]:
    yield "GPU slots", lambda o: sum(o["run"]["supply"].values()), number
    yield "workloads finished", lambda o: o["finished"], number
    yield "GPUs allocated", lambda o: o["allocation_rate"], percent
    judged = [_judged(until, quota, "all", title) for quota, title in QUOTAS.items() for until in UNTIL]
    yield from (missed for missed, _ in judged)
    yield from (waited for _, waited in judged)
    yield "preemptions", lambda o: o["preemptions"], number
    yield "GPU hours lost", lambda o: o["lost_gpu_hours"], number


def _judged(until: str, quota: str, level: str, of: str) -> tuple[_Figure, _Figure]:
    """Returns the rate of missed objectives, and the 95th percentile of the waits."""
    rate, waits = until_key("objective_miss_rate", until), until_key("waits", until)
    return (
        (f"not {DONE[until]} in time, {of}", lambda o: o[rate][quota][level], percent),
        (f"P95 wait until {DONE[until]}, {of}", lambda o: o[waits][quota][level]["p95"], span),
    )


def _row(before: PolicyRow, after: PolicyRow, figure: _Figure) -> list[str]:
    name, of, shown = figure
    old, new = of(before), of(after)
    if shown(old) == shown(new):
        by = "same"
    elif old is None or new is None:
        by = NONE
    else:
        by = ("+" if new > old else "−") + shown(abs(new - old))
        if shown is percent:
            by = by.replace(" %", " points")
    return [after["policy"], name, shown(old), shown(new), by]
