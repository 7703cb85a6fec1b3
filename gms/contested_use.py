"""Tenants' use relative to their quota: the input of the fair-share term of the credit.

Only contested use counts: use at times when workloads of other tenants wait. So a tenant that runs on resources that no
other tenant requests loses no credit.
"""

from bisect import bisect_right
from collections.abc import Collection

import numpy as np

from domain.scheduling import TenantState
from gms.columns import QueueColumns

WAITS_AFTER_S = 60.0
"""A workload that waits for less time does not make the use of other tenants contested: most awards take seconds."""


class _Clock:
    """The sum of the times during which it was on."""

    def __init__(self, *, on: bool) -> None:
        """`on`: whether it was on at all times before the first change."""
        self._first = on
        self._changes: list[float] = []
        """The times of the changes; `_sums` has the sum at each. Each change turns the clock on or off."""
        self._sums: list[float] = []

    def turn(self, now: float, *, on: bool) -> None:
        """Turns the clock on or off. A time before that of the last change counts as that of the last change."""
        if on != self._is_on(len(self._changes)):
            now = max([now, *self._changes[-1:]])
            total = self.at(now)
            self._changes.append(now)
            self._sums.append(total)

    def at(self, t: float) -> float:
        """Returns the sum up to a time. Only differences of sums have a meaning."""
        if not self._changes:
            return t if self._first else 0
        passed = bisect_right(self._changes, t)
        near = max(passed - 1, 0)
        return self._sums[near] + (t - self._changes[near] if self._is_on(passed) else 0)

    def forget(self, before: float) -> None:
        """Forgets the changes before a time, except the last one. Sums up to that time are arbitrary from then on."""
        gone = max(bisect_right(self._changes, before) - 1, 0)
        self._first = self._is_on(gone)
        del self._changes[:gone], self._sums[:gone]

    def _is_on(self, changes: int) -> bool:
        return self._first != bool(changes % 2)


class ContestedTime:
    """For each tenant, the time during which workloads of other tenants waited.

    The time before the first call of `mark` counts as contested. Times have any unit; whole numbers stay exact.
    """

    def __init__(self) -> None:
        self._any = _Clock(on=True)
        """On while any tenant waits."""
        self._alone: dict[str, _Clock] = {}
        """On while this tenant waits, and no other."""

    def mark(self, now: float, waiting: Collection[str]) -> None:
        """Sets the tenants whose workloads wait from now on."""
        self._any.turn(now, on=bool(waiting))
        only = next(iter(waiting)) if len(waiting) == 1 else None
        if only is not None:
            self._alone.setdefault(only, _Clock(on=False))
        for tenant, clock in self._alone.items():
            clock.turn(now, on=tenant == only)

    def forget(self, before: float) -> None:
        """Deletes the changes before a time: `at` is exact only from then on. This bounds the memory used."""
        for clock in (self._any, *self._alone.values()):
            clock.forget(before)

    def at(self, tenant: str, t: float) -> float:
        """Returns a tenant's contested time up to `t`. Only differences have a meaning."""
        alone = self._alone.get(tenant)
        return self._any.at(t) - (0 if alone is None else alone.at(t))


def waiting_tenants(queue: QueueColumns, now_s: float) -> frozenset[str]:
    """Returns the tenants with pending workloads that are not held and were submitted at least `WAITS_AFTER_S` ago."""
    rows = queue.pending
    upto = int(np.searchsorted(rows.at_s, now_s - WAITS_AFTER_S, "right"))
    found = rows.columns["tenant"][:upto][~rows.columns["held"][:upto]]
    return frozenset(queue.tenants[number].name for number in np.unique(found).tolist())


def share_of_quota(tenant: TenantState, used: tuple[float, float], fleet: tuple[int, int]) -> float:
    """Returns the larger of the shares of a tenant's quotas that an average use of GPUs and thousandths of a core is.

    An unlimited quota of CPUs counts as the CPUs of the fleet, and no quota as one slot or one core. The share of a
    resource that the fleet does not have is 0.
    """
    quota_cpus = fleet[1] if tenant.quota_cpus_milli is None else max(tenant.quota_cpus_milli, 1000)
    quotas = max(sum(tenant.quota_gpus.values()), 1), quota_cpus
    return larger_share(used, (quotas[0] if fleet[0] else 0, quotas[1] if fleet[1] else 0))


def larger_share(used: tuple[float, float], of: tuple[int, int]) -> float:
    """Returns the larger of two shares; a share of nothing is 0."""
    return max(amount / whole if whole else 0.0 for amount, whole in zip(used, of, strict=True))
