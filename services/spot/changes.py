"""Actions that bring the number of replicas of one capacity kind to a wanted number."""

from collections.abc import Iterable, Sequence

from domain.capacity import CapacityKind
from services.spot.values import Action, Launch, SpotReplica, Terminate


def surplus(replicas: Iterable[SpotReplica], keep: int) -> tuple[Action, ...]:
    """Returns the terminations that leave `keep` replicas: first those that are not ready, then the newest ones."""
    kept_first = sorted(replicas, key=lambda one: (not one.is_ready, one.number))
    return tuple(Terminate(one.number) for one in kept_first[keep:])


def on_demand(replicas: Sequence[SpotReplica], wanted: int) -> tuple[Action, ...]:
    """Returns the actions after which `wanted` on-demand replicas are launched; `replicas` are those there now."""
    missing = wanted - len(replicas)
    return (Launch(CapacityKind.ON_DEMAND),) * missing if missing > 0 else surplus(replicas, wanted)


def split(replicas: Iterable[SpotReplica]) -> tuple[list[SpotReplica], list[SpotReplica]]:
    """Returns the spot replicas and the on-demand replicas."""
    spot: list[SpotReplica] = []
    others: list[SpotReplica] = []
    for one in replicas:
        (spot if one.is_spot else others).append(one)
    return spot, others
