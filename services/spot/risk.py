"""The expected cost of a plan: that of its replicas, and that of the losses that it does not survive."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A place in which replicas can be launched: a zone, or on-demand machines, which are never lost."""

    zone: str | None
    """The name of the zone; None for on-demand machines."""
    usd_per_h: float
    """The price of a replica."""
    losses_per_h: float
    """The expected losses for each hour in which replicas are held; 0 for on-demand machines."""
    group: int
    """The group of zones that fail together."""
    held: int
    """The number of replicas there now, requested ones included."""
    most: int
    """The largest number of replicas that are available there now."""
    obtainability: float = 1.0
    """The probability that a launch succeeds, above 0."""
    least: int = 0
    """The number of replicas there that are not ended now."""


@dataclass(frozen=True)
class RiskModel:
    """Prices plans. A plan is the number of replicas in each option, in the order of the options."""

    options: tuple[Option, ...]
    target: int
    """N_tar, the number of replicas that should be ready."""
    cold_start_h: float
    """The time in hours until the replacement of a lost replica is ready."""
    outage_usd: float
    """The price of a loss that leaves fewer than N_tar replicas."""
    whole_share: float
    """The share of losses that take all replicas of a zone. Other losses take 1 to n - 1 of n, equally likely."""
    joint_share: float
    """The share of losses in which the other zones of the group are lost too."""
    far_share: float
    """The share of losses in which the zones of all other groups are lost too."""
    horizon_h: float
    """The time in hours over which the cost of launches is spread."""
    base: int = 0
    """The number of on-demand replicas that each plan contains, at most N_tar."""
    refusal_usd: float = 0.0
    """The price of waiting for a refusal: what a replica costs that stands in meanwhile."""
    is_still: bool = False
    """Whether plans move no replicas from one zone to another."""
    least_spot: int = 0
    """The least number of spot replicas of each plan."""

    def usd_per_h(self, plan: Sequence[int]) -> float:
        """Returns the expected cost of a plan with at least N_tar replicas, in the unit of the prices.

        The cost has four parts: the price of the replicas; the price of outages, which does not depend on the cold
        start; the price of the cold starts with which lost replicas are replaced; and the cold starts of the replicas
        that the plan has to launch first, which are billed in addition to the replicas that serve until then. A launch
        that may be refused counts as more than one, and each refusal has its price.
        """
        cost = launches = 0.0
        for option, count in zip(self.options, plan, strict=True):
            cost += count * option.usd_per_h * (1 + option.losses_per_h * self.cold_start_h)
            if count > option.held:
                tries = (count - option.held) / option.obtainability
                launches += tries * option.usd_per_h * self.cold_start_h
                launches += (tries - (count - option.held)) * self.refusal_usd
        cost += launches / self.horizon_h
        return cost + self.outages_per_h(plan) * self.outage_usd

    def outages_per_h(self, plan: Sequence[int]) -> float:
        """Returns the expected number of losses after which fewer than N_tar replicas are left, for each hour."""
        spare = sum(plan) - self.target
        both = zip(self.options, plan, strict=True)
        used = [(option, count) for option, count in both if count and option.losses_per_h]
        losses_per_h = sum(option.losses_per_h for option, _ in used)
        spot = sum(count for _, count in used)
        rate = 0.0
        for option, count in used:
            if count > spare:
                partial = max(0, count - 1 - spare) / (count - 1) if count > 1 else 1.0
                rate += option.losses_per_h * (self.whole_share + (1 - self.whole_share) * partial)
                continue
            near = sum(other for one, other in used if one.group == option.group)
            share = 0.0
            if near > spare and near > count:
                share += self.joint_share
            if spot > spare and spot > near:
                share += self.far_share
            if spot > spare and spot > count:
                # Another zone is lost independently before the first loss is replaced.
                share += (losses_per_h - option.losses_per_h) * self.cold_start_h
            rate += option.losses_per_h * self.whole_share * min(1.0, share)
        return rate
