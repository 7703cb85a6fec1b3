"""What kind of machines a cluster has, and what an hour of them costs."""

import math
from collections.abc import Mapping
from enum import StrEnum


class CapacityKind(StrEnum):
    """How machines are had, and how they may leave."""

    RESERVED = "reserved"
    """Paid for in any case: owned, or reserved for long."""
    ON_DEMAND = "on_demand"
    """Paid by the hour, and kept for as long as wanted."""
    SPOT = "spot"
    """Paid by the hour, and taken back at short notice when others pay more."""
    VOLUNTARY = "voluntary"
    """Lent by owners who take them back at will."""


USUAL = (CapacityKind.RESERVED.value, CapacityKind.ON_DEMAND.value, CapacityKind.SPOT.value)
"""What a workload may run on where its document does not say it, in order of preference."""
CPU = "cpu"
"""The key of a core's price, beside those of GPU types."""


NANO_USD = 1_000_000_000
"""Prices are compared in whole billionths of a US dollar an hour, so that sums do not depend on their order."""


def nano_usd_per_h(gpus: int, gpu_usd_per_h: float, cpus_milli: int, core_usd_per_h: float) -> int:
    """The price of an hour of so many GPUs and thousandths of a core, in billionths of a US dollar."""
    return gpus * round(gpu_usd_per_h * NANO_USD) + cpus_milli * round(core_usd_per_h * NANO_USD) // 1000


def check_prices(prices: Mapping[str, float]) -> None:
    """Prices in US dollars an hour: of a GPU by its type, of a core as `cpu`.

    Raises:
        ValueError: one is negative or no number.
    """
    for name, price in prices.items():
        if not 0 <= price < math.inf:
            raise ValueError(f"{name}: {price}: must be US dollars an hour, 0 or more")
