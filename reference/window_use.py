"""Plain reference implementation of `gms.contested_use` and of the use over a window, for tests only."""

from collections.abc import Collection, Iterable, Sequence

Use = tuple[str, int, int, tuple[int, int]]
"""Tenant, begin, end, and what is held from begin to end."""
Mark = tuple[int, Collection[str]]
"""From this time on, these tenants have waiting workloads."""


def used(uses: Iterable[Use], tenant: str, from_: int, to: int, marks: Sequence[Mark] = ()) -> tuple[int, int]:
    """Returns a tenant's use from `from_` to `to`, times the span, while other tenants waited.

    The time before the first of the marks, which are in order of time, counts.
    """
    total = [0, 0]
    for owner, began, ended, holds in uses:
        if owner == tenant:
            for k in (0, 1):
                total[k] += holds[k] * _contested(tenant, max(began, from_), min(ended, to), marks)
    return total[0], total[1]


def _contested(tenant: str, from_: int, to: int, marks: Sequence[Mark]) -> int:
    spans = [(from_, marks[0][0] if marks else to)]
    ends = [begin for begin, _ in marks[1:]] + [to]
    for (begin, waiting), end in zip(marks, ends, strict=False):
        if set(waiting) - {tenant}:
            spans.append((begin, end))
    return sum(max(0, min(end, to) - max(begin, from_)) for begin, end in spans)
