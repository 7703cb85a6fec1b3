"""All policies of replays by name: those of services, and those that they are compared with."""

from collections.abc import Callable, Mapping

from research.spot.baselines import AsgLike, EvenSpread, MarkLike, RoundRobin, SpotOnly
from services.spot import policies
from services.spot.policies import PolicySettings
from services.spot.values import Policy

POLICIES: Mapping[str, Callable[[PolicySettings], Policy]] = {
    "spothedge": policies.POLICIES["spothedge"],
    "spothedge-alg1": policies.POLICIES["spothedge-alg1"],
    "spothedge+": policies.POLICIES["spothedge+"],
    "even-spread": lambda s: EvenSpread(s.zones, retry_s=s.retry_s),
    "round-robin": lambda s: RoundRobin(s.zones, retry_s=s.retry_s),
    "spot-only": lambda s: SpotOnly(s.zones, retry_s=s.retry_s),
    "asg-like": lambda s: AsgLike(EvenSpread(s.zones, retry_s=s.retry_s)),
    "mark-like": lambda s: MarkLike(s.zones, retry_s=s.retry_s),
    "on-demand": policies.POLICIES["on-demand"],
}


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """Returns a policy by its name in `POLICIES`.

    Raises:
        KeyError: no policy has this name.
    """
    return POLICIES[name](settings)
