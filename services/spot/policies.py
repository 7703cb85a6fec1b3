"""The policies by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.spot.changes import on_demand, split, surplus
from services.spot.estimates import Estimates
from services.spot.placement import DynamicPlacement
from services.spot.spothedge import SpotHedge
from services.spot.spothedge_plus import OUTAGE_PRICE_S, SpotHedgePlus
from services.spot.state import PolicyState
from services.spot.values import Action, Observation, Policy, Zone


@dataclass(frozen=True)
class PolicySettings:
    """The settings with which a named policy is made."""

    zones: tuple[Zone, ...]
    """The enabled zones, at least one; the policies break ties by their order."""
    extra: int = 1
    """N_extra of SpotHedge. `spothedge+` chooses its own."""
    retry_s: float = 300.0
    """The time in seconds after which a zone that refused a launch is tried again."""
    base: int = 0
    """The number of on-demand replicas that SpotHedge and `spothedge+` always keep."""
    fallback: bool = True
    """Whether SpotHedge and `spothedge+` launch on-demand replicas beyond the base."""
    on_demand_usd_per_h: float = 3.0
    """The price of an on-demand replica, in the unit of the prices of the zones; only `spothedge+` uses it."""
    outage_price_s: float = OUTAGE_PRICE_S
    """The price that `spothedge+` sets on an outage; see `SpotHedgePlus.outage_price_s`."""


@dataclass(frozen=True)
class AllOnDemand:
    """On-demand replicas only: N_tar of them. Costs are relative to this policy."""

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return PolicyState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `Policy.decide`."""
        spot, others = split(observation.replicas)
        return state, (*surplus(spot, 0), *on_demand(others, observation.target))


def _spothedge(spread: bool) -> Callable[[PolicySettings], Policy]:
    return lambda s: SpotHedge(DynamicPlacement(s.zones, spread), s.extra, s.base, s.fallback, s.retry_s)


POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "spothedge": _spothedge(True),
    "spothedge-alg1": _spothedge(False),
    "spothedge+": lambda s: SpotHedgePlus(
        Estimates(s.zones), s.on_demand_usd_per_h, s.outage_price_s, s.base, s.fallback, retry_s=s.retry_s
    ),
    "on-demand": lambda _: AllOnDemand(),
}
"""How each policy is made. `spothedge` prefers zones with fewer replicas; `spothedge-alg1` is Algorithm 1 literally."""


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """Returns a policy by its name in `POLICIES`.

    Raises:
        KeyError: no policy has this name.
    """
    return POLICIES[name](settings)
