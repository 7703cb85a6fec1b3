"""Where a waiting workload lacks nothing but machines."""

from collections.abc import Mapping, Sequence
from typing import Any

from domain.reasons import ReasonCode
from domain.spread import SpreadLevel

_FOR_WANT_OF_MACHINES = {
    ReasonCode.INSUFFICIENT_CAPACITY.value,
    ReasonCode.NO_HARDWARE.value,
    ReasonCode.REFUSED_LIKE.value,
    ReasonCode.IN_OTHER_POOLS.value,
}


def short_regions(reasons: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Returns the regions that refuse a workload only because they lack machines; `reasons`: those of its wait."""
    codes: dict[str, set[str]] = {}
    for reason in reasons:
        detail = reason.get("detail") or {}
        if reason["code"] == ReasonCode.SPREAD_REQUIRED.value and detail.get("level") == SpreadLevel.MACHINE.value:
            continue  # A new machine is another machine. It may be in the same rack, cluster or zone.
        if (region := detail.get("region")) is not None:
            codes.setdefault(region, set()).add(reason["code"])
    return frozenset(region for region, found in codes.items() if found <= _FOR_WANT_OF_MACHINES)
