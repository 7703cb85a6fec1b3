"""Compares each policy's figures without and with a change, for what-if runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.meter import UNTIL
from simulation.result import until_key
from simulation.settings import LEVELS
from simulation.words import NONE, PolicyRow, number, percent, span

QUOTAS = {"within_quota": "within quota", "over_quota": "over quota"}
DONE = {"award": "awarded", "start": "started"}
"""Text in reports for each event that ends a wait."""


@dataclass(frozen=True)
class FigureChange:
    """One figure of one policy without and with the change, as text. `by` is empty if the texts are equal."""

    policy: str
    figure: str
    before: str
    after: str
    by: str


def pairs(outcomes: Sequence[PolicyRow]) -> list[tuple[PolicyRow, PolicyRow]]:
    """Returns each policy's (unchanged run, changed run); policies with only one of them are left out."""
    unchanged = {one["policy"]: one for one in outcomes if not one["run"]["change"]}
    return [(unchanged[one["policy"]], one) for one in outcomes if one["run"]["change"] and one["policy"] in unchanged]


def differences(before: PolicyRow, after: PolicyRow) -> list[FigureChange]:
    """Returns the main figures of a policy, and the figures by priority that differ."""
    rows = [_difference(after["policy"], *figure, before, after) for figure in _main()]
    by_priority = (_difference(after["policy"], *figure, before, after) for figure in _by_priority())
    return rows + [row for row in by_priority if row.by]


_Figure = tuple[str, Callable[[PolicyRow], Any], Callable[[float | None], str]]


def _main() -> Iterator[_Figure]:
    yield "GPU slots", lambda o: sum(o["run"]["supply"].values()), number
    yield "workloads finished", lambda o: o["finished"], number
    yield "GPUs allocated", lambda o: o["allocation_rate"], percent
    for quota, title in QUOTAS.items():
        for until in UNTIL:
            yield f"not {DONE[until]} in time, {title}", _cell("objective_miss_rate", until, quota, "all"), percent
    for quota, title in QUOTAS.items():
        for until in UNTIL:
            yield f"P95 wait until {DONE[until]}, {title}", _wait(until, quota, "all"), span
    yield "preemptions", lambda o: o["preemptions"], number
    yield "GPU hours lost", lambda o: o["lost_gpu_hours"], number


def _by_priority() -> Iterator[_Figure]:
    for quota, title in QUOTAS.items():
        for level in map(str, LEVELS):
            for until in UNTIL:
                of = f"{title}, priority {level}"
                yield f"not {DONE[until]} in time, {of}", _cell("objective_miss_rate", until, quota, level), percent
                yield f"P95 wait until {DONE[until]}, {of}", _wait(until, quota, level), span


def _cell(table: str, until: str, quota: str, level: str) -> Callable[[PolicyRow], Any]:
    return lambda o: o[until_key(table, until)][quota][level]


def _wait(until: str, quota: str, level: str) -> Callable[[PolicyRow], Any]:
    return lambda o: o[until_key("waits", until)][quota][level]["p95"]


def _difference(
    policy: str,
    figure: str,
    of: Callable[[PolicyRow], Any],
    shown: Callable[[Any], str],
    before: PolicyRow,
    after: PolicyRow,
) -> FigureChange:
    old, new = of(before), of(after)
    if shown(old) == shown(new):
        by = ""
    elif old is None or new is None:
        by = NONE
    else:
        by = ("+" if new > old else "−") + shown(abs(new - old))
        if shown is percent:
            by = by.replace(" %", " points")
    return FigureChange(policy, figure, shown(old), shown(new), by)
