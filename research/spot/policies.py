"""The policies that `mizzen spot replay` knows, by name: `spothedge`, which services use, and its competitors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from research.spot.baselines import AsgLike, EvenSpread, MarkLike, RoundRobin, SpotOnly
from research.spot.estimates import Estimates
from research.spot.spothedge_plus import OUTAGE_PRICE_S, SpotHedgePlus
from services.spot import policies
from services.spot.placement import DynamicPlacement
from services.spot.policies import PolicySettings
from services.spot.spothedge import SpotHedge
from services.spot.values import SpotPolicy


@dataclass(frozen=True)
class ReplayPolicySettings(PolicySettings):
    """The settings with which a policy of a replay is made; only `spothedge+` uses these."""

    on_demand_usd_per_h: float = 3.0
    """The price of an on-demand replica, in the unit of the prices of the zones."""
    outage_price_s: float = OUTAGE_PRICE_S
    """The price of an outage; see `SpotHedgePlus.outage_price_s`."""


POLICIES: Mapping[str, Callable[[ReplayPolicySettings], SpotPolicy]] = {
    "spothedge": policies.POLICIES["spothedge"],
    "spothedge-alg1": lambda s: SpotHedge(DynamicPlacement(s.zones, False), s.extra, s.base, s.fallback, s.retry_s),
    "spothedge+": lambda s: SpotHedgePlus(
        Estimates(s.zones), s.on_demand_usd_per_h, s.outage_price_s, s.base, s.fallback, retry_s=s.retry_s
    ),
    "even-spread": lambda s: EvenSpread(s.zones, retry_s=s.retry_s),
    "round-robin": lambda s: RoundRobin(s.zones, retry_s=s.retry_s),
    "spot-only": lambda s: SpotOnly(s.zones, retry_s=s.retry_s),
    "asg-like": lambda s: AsgLike(EvenSpread(s.zones, retry_s=s.retry_s)),
    "mark-like": lambda s: MarkLike(s.zones, retry_s=s.retry_s),
    "on-demand": policies.POLICIES["on-demand"],
}
"""How each policy is made. `spothedge` prefers zones with fewer replicas; `spothedge-alg1` is Algorithm 1 literally."""


def make_policy(name: str, settings: ReplayPolicySettings) -> SpotPolicy:
    """Returns a policy by its name in `POLICIES`.

    Raises:
        KeyError: no policy has this name.
    """
    return POLICIES[name](settings)
