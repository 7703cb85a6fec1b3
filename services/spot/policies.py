"""The policies by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.spot.estimates import Estimates
from services.spot.placement import DynamicPlacement
from services.spot.spothedge import SpotHedge, on_demand, split, surplus
from services.spot.spothedge_plus import OUTAGE_PRICE_S, SpotHedgePlus
from services.spot.values import Action, Observation, PolicyState, SpotPolicy, Zone


@dataclass(frozen=True)
class PolicySettings:
    """The settings with which a named policy is made."""

    zones: tuple[Zone, ...]
    """The enabled zones, at least one; the policies break ties by their order."""
    extra: int = 1
    """N_extra of SpotHedge; `spothedge+` chooses its own."""
    retry_s: float = 300.0
    """The time in seconds after which a zone that refused a launch is tried again, see `PolicyState.refused`."""
    base: int = 0
    """The number of on-demand replicas that SpotHedge and `spothedge+` always keep."""
    fallback: bool = True
    """Whether SpotHedge and `spothedge+` launch on-demand replicas beyond the base."""
    on_demand_usd_per_h: float = 3.0
    """The price of an on-demand replica, in the unit of the prices of the zones; only `spothedge+` uses it."""
    outage_price_s: float = OUTAGE_PRICE_S
    """The price of an outage for `spothedge+`; see `SpotHedgePlus.outage_price_s`."""


@dataclass(frozen=True)
class AllOnDemand:
    """On-demand replicas only: N_tar of them. Costs are relative to this policy."""

    def start(self) -> PolicyState:
        """See `SpotPolicy.start`."""
        return PolicyState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `SpotPolicy.decide`."""
        spot, others = split(observation.replicas)
        return state, (*surplus(spot, 0), *on_demand(others, observation.target))


POLICIES: Mapping[str, Callable[[PolicySettings], SpotPolicy]] = {
    "spothedge": lambda s: SpotHedge(DynamicPlacement(s.zones), s.extra, s.base, s.fallback, s.retry_s),
    "spothedge+": lambda s: SpotHedgePlus(
        Estimates(s.zones), s.on_demand_usd_per_h, s.outage_price_s, s.base, s.fallback, retry_s=s.retry_s
    ),
    "on-demand": lambda _: AllOnDemand(),
}
"""How each policy is made."""


def make_policy(name: str, settings: PolicySettings) -> SpotPolicy:
    """Returns a policy by its name in `POLICIES`.

    Raises:
        KeyError: no policy has this name.
    """
    return POLICIES[name](settings)
