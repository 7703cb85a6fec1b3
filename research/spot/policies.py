"""The policies that `mizzen spot replay` knows, by name: those of services, and their competitors."""

from collections.abc import Callable, Mapping

from research.spot.baselines import AsgLike, EvenSpread, MarkLike, RoundRobin, SpotOnly
from services.spot import policies
from services.spot.placement import DynamicPlacement
from services.spot.policies import PolicySettings
from services.spot.spothedge import SpotHedge
from services.spot.values import SpotPolicy

POLICIES: Mapping[str, Callable[[PolicySettings], SpotPolicy]] = {
    "spothedge": policies.POLICIES["spothedge"],
    "spothedge-alg1": lambda s: SpotHedge(DynamicPlacement(s.zones, False), s.extra, s.base, s.fallback, s.retry_s),
    "spothedge+": policies.POLICIES["spothedge+"],
    "even-spread": lambda s: EvenSpread(s.zones, retry_s=s.retry_s),
    "round-robin": lambda s: RoundRobin(s.zones, retry_s=s.retry_s),
    "spot-only": lambda s: SpotOnly(s.zones, retry_s=s.retry_s),
    "asg-like": lambda s: AsgLike(EvenSpread(s.zones, retry_s=s.retry_s)),
    "mark-like": lambda s: MarkLike(s.zones, retry_s=s.retry_s),
    "on-demand": policies.POLICIES["on-demand"],
}
"""How each policy is made. `spothedge` prefers zones with fewer replicas; `spothedge-alg1` is Algorithm 1 literally."""


def make_policy(name: str, settings: PolicySettings) -> SpotPolicy:
    """Returns a policy by its name in `POLICIES`.

    Raises:
        KeyError: no policy has this name.
    """
    return POLICIES[name](settings)
