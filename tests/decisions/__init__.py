"""The decisions of GMS and RMS: against their plain references, against what must never happen, and by example."""

import os

from hypothesis import HealthCheck, settings

PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""What the property tests here have in common: nothing about a slow machine is a failure."""

_SHARE = float(os.environ.get("MIZZEN_EXAMPLES", "0.5"))


def examples(number: int) -> int:
    """How many of a property's examples are tried: half of `number`, or all of them in `make properties`.

    Each run draws its own examples. MIZZEN_EXAMPLES is the share that is tried; it may be more than 1.
    """
    return max(1, round(number * _SHARE))
