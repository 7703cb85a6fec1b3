"""Capacity kinds of machines, and prices per hour."""

from collections.abc import Iterable, Sequence
from enum import StrEnum


class CapacityKind(StrEnum):
    """How machines were obtained, which also says how they can be taken away."""

    RESERVED = "reserved"
    """Paid for whether used or not: owned, or reserved for a long term."""
    ON_DEMAND = "on_demand"
    """Paid by the hour, and kept until released."""
    SPOT = "spot"
    """Paid by the hour, and reclaimed by the provider at short notice when it needs the capacity."""
    VOLUNTARY = "voluntary"
    """Lent by owners who can take the machines back at any time."""


USUAL = (CapacityKind.RESERVED.value, CapacityKind.ON_DEMAND.value, CapacityKind.SPOT.value)
"""The default capacity kinds of a workload, in order of preference."""
OWN = "own"
"""In a document's list of capacity kinds: the machines that only the workload's tenant may use (`mizzen pilots`)."""
CPU = "cpu"
"""The key of the price of one core in a mapping of prices; the other keys are GPU types."""


def dedicated(cluster: str) -> str:
    """Returns the value that replaces the capacity kind in bids for a cluster that is dedicated to a service.

    Only a workload that names the cluster accepts it, and such a workload accepts nothing else.
    """
    return f"cluster:{cluster}"


def own_of(tenant: str) -> str:
    """Returns the value that replaces the capacity kind in bids for a cluster that only one tenant may use."""
    return f"tenant:{tenant}"


_POOL = "pool:"


def pooled(pool: str, kind: str) -> str:
    """Returns the value that replaces a capacity kind in bids for machines of a pool that only some tenants may use.

    `pool` is `region/name`. The workloads of these tenants accept the value where they accept the kind (`with_pools`).
    """
    return f"{_POOL}{pool}:{kind}"


def with_pools(kinds: Sequence[str], pools: Iterable[str]) -> tuple[str, ...]:
    """Returns the capacity kinds that a workload accepts whose tenant may use `pools`, before others of each kind."""
    pools = tuple(pools)
    return tuple(one for kind in kinds for one in (*(pooled(pool, kind) for pool in pools), kind))


def kind_in_pool(kind: str) -> str:
    """Returns the capacity kind that a value of `pooled` replaces; other values unchanged."""
    return kind.split(":", 2)[2] if kind.startswith(_POOL) else kind


NANO_USD = 1_000_000_000
"""Prices are compared in whole billionths of a US dollar an hour, so that a sum does not depend on the order of its
terms."""


NANO_DEPARTURES = 1_000_000_000
"""Departures are compared in whole billionths an hour, for the same reason."""


def nano_usd_per_h(gpus: int, gpu_usd_per_h: float, cpus_milli: int, core_usd_per_h: float) -> int:
    """Returns the price of `gpus` GPUs and `cpus_milli` thousandths of a core, in billionths of a US dollar an hour."""
    return gpus * round(gpu_usd_per_h * NANO_USD) + cpus_milli * round(core_usd_per_h * NANO_USD) // 1000
