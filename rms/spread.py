"""Spreads the workloads of a group: how many others of the group share a machine, its rack, its cluster and its zone.

The levels are compared in the order of `SpreadRule.order`. A plan counts as crowded as its most crowded machine. Of a
workload with a required spread, machines in places with others of its group have no room for it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from domain.scheduling import PlacementRequest, Plan
from domain.spread import SpreadLevel, SpreadRule
from rms.arrays import I4, I8
from rms.machines import MachinePlace
from rms.region import RegionColumns


def others(region: RegionColumns, rule: SpreadRule | None) -> tuple[frozenset[MachinePlace], ...]:
    """Returns the places in the region of each other workload of the group, without the one that it replaces."""
    if rule is None:
        return ()
    ids = sorted(region.group(rule.group) - {rule.beside})
    found = (frozenset(region.places_of(id_)) for id_ in ids)
    return tuple(places for places in found if places)


def occupied(region: RegionColumns, rule: SpreadRule, level: SpreadLevel) -> Counter[tuple[str, ...]]:
    """Returns how many others of the group are in each place of a level, by the place's names."""
    return Counter(name for places in others(region, rule) for name in {place.at(level) for place in places})


def keeping_apart(region: RegionColumns, request: PlacementRequest) -> PlacementRequest:
    """Returns the request with the machines that a required spread forbids as machines to avoid."""
    rule = request.spread
    if rule is None or not rule.required:
        return request
    near = {region.ids[row] for name in occupied(region, rule, rule.over) for row in region.rows_at(rule.over, name)}
    too_close = frozenset(near - (request.avoids - request.too_close))
    return replace(request, avoids=request.avoids | too_close, too_close=too_close)


@dataclass(frozen=True)
class Crowding:
    """How many others of a group share the places of each machine."""

    counts: I8
    """(levels, machines): by the levels in the order of the rule."""
    codes: I8
    """(machines,): one number for each column of `counts`, in the same order."""

    def of(self, rows: I4) -> tuple[int, ...]:
        """Returns the counts of the most crowded of some machines."""
        return tuple(self.counts[:, rows[np.argmax(self.codes[rows])]].tolist())

    def closed_rows(self, rows: I4) -> Iterator[I8]:
        """Yields, for each crowding below that of the machines `rows`, the machines that are more crowded than it.

        The least crowding comes first.
        """
        for most in np.unique(self.codes[self.codes < self.codes[rows].max()]).tolist():
            yield np.flatnonzero(self.codes > most)


def crowding(region: RegionColumns, rule: SpreadRule | None) -> Crowding | None:
    """Returns the crowding of the region's machines; None: no other workload of the group is there."""
    there = others(region, rule)
    if rule is None or not there:
        return None
    counts = np.zeros((len(rule.order), len(region.ids)), np.int64)
    for number, level in enumerate(rule.order):
        for name, many in occupied(region, rule, level).items():
            counts[number, region.rows_at(level, name)] += many
    weights = (len(there) + 1) ** np.arange(len(counts) - 1, -1, -1, dtype=np.int64)
    return Crowding(counts, weights @ counts)


def crowding_of(region: RegionColumns, plan: Plan, request: PlacementRequest) -> tuple[int, ...] | None:
    """Returns the crowding of a plan now; None: no other workload of the group is in the region.

    Machines that the region does not have do not count.
    """
    known = crowding(region, request.spread)
    rows = [row for job in plan.jobs for machine, _ in job.machines if (row := region.row(machine)) is not None]
    return None if known is None or not rows else known.of(np.array(rows, np.int32))
