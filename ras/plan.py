"""A plan for the pools of a region, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ras.intents import Intent
from ras.supply import NO_POOL, CellKey, PooledType, Supply

Targets = Mapping[CellKey, Mapping[str, int]]
"""For each cell, the number of machines of each pool that has or gets some."""


@dataclass(frozen=True)
class ChangeCosts:
    """The costs of changes, in thousandths of the move of an idle machine."""

    idle: int = 1000
    busy: int = 10_000
    """The move of a machine in use: its workloads must save, and start elsewhere."""
    launch: int = 1000
    launched_usd_per_h: int = 1000
    """For each US dollar an hour of a launched machine."""


@dataclass(frozen=True)
class PoolOutcome:
    """What a plan gives one pool of one resource, in units."""

    pool: str
    resource: str
    size: int
    needed: int
    """The size and the buffer for random failures."""
    total: int
    after_loss: int
    """What counts when the fault domain with most of the pool is lost (if the pool must survive that)."""

    @property
    def short(self) -> int:
        """How many units the pool lacks of what it needs."""
        return max(0, self.needed - self.after_loss)


@dataclass(frozen=True)
class Gap:
    """How good a plan is proved to be, for one resource."""

    resource: str
    short: int
    """The shortfall of all pools, in units."""
    least_short: int
    """The proved lower bound of it."""
    cost: int
    """The cost of all changes (`ChangeCosts`)."""
    least_cost: float
    """The proved lower bound, for plans that spread as little shortfall in the same way."""

    @property
    def relative(self) -> float:
        """The relative gap of the cost; infinite if a smaller shortfall is not excluded."""
        if self.short > self.least_short:
            return float("inf")
        return 0.0 if self.cost == 0 else (self.cost - self.least_cost) / self.cost


@dataclass(frozen=True)
class RegionPlan:
    """The machines of each pool, and the proofs."""

    targets: Targets
    outcomes: Sequence[PoolOutcome]
    """Sorted by resource and pool."""
    gaps: Sequence[Gap]

    @property
    def shortfalls(self) -> list[PoolOutcome]:
        """The pools that lack something."""
        return [one for one in self.outcomes if one.short]


def outcome(intent: Intent, resource: str, targets: Targets) -> PoolOutcome:
    """Returns what a pool has of a resource under a plan."""
    by_domain: dict[str, int] = {}
    for (domain, type_), pools in targets.items():
        if type_.resource == resource:
            by_domain[domain] = by_domain.get(domain, 0) + type_.units * pools.get(intent.pool, 0)
    counted = [int(min(units, intent.most_of_a_domain(resource))) for units in by_domain.values()]
    left = sum(counted) - (max(counted, default=0) if intent.survives_loss else 0)
    return PoolOutcome(
        intent.pool, resource, intent.sizes.get(resource, 0), intent.needs(resource), sum(by_domain.values()), left
    )


def cost(supply: Supply, targets: Targets, prices: ChangeCosts, resource: str) -> int:
    """Returns the cost of the changes to a plan: machines that leave their pool, join one, or are launched.

    A machine that goes from one pool to another is one change.
    """
    total = 0
    for (domain, type_), cell in supply.items():
        if type_.resource != resource:
            continue
        wanted = targets[domain, type_]
        for pool in {*cell.idle, *cell.busy} - {NO_POOL}:
            leaving = cell.held(pool) - wanted.get(pool, 0)
            total += _cheapest(leaving, [(prices.idle, cell.idle[pool]), (prices.busy, cell.busy[pool])])
        sources = [
            (prices.idle, cell.idle[NO_POOL]),
            (prices.busy, cell.busy[NO_POOL]),
            (launch_cost(type_, prices), cell.offered),
        ]
        total += _cheapest(sum(wanted.values()) - cell.present + cell.held(NO_POOL), sources)
    return total


def launch_cost(type_: PooledType, prices: ChangeCosts) -> int:
    """Returns the cost of launching one machine of a type."""
    return prices.launch + round(type_.usd_per_h * prices.launched_usd_per_h)


def _cheapest(count: int, sources: Sequence[tuple[int, int]]) -> int:
    """Returns the cost of `count` machines of the cheapest sources, each a cost and a number of machines."""
    total, left = 0, max(0, count)
    for price, there in sorted(sources):
        total += price * min(left, there)
        left -= min(left, there)
    return total
