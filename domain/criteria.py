"""How the plans for one workload compare (MAST 4.3): one list of criteria, in order. A smaller value is better.

The fields of `PlanQuality` are the list. The auction, the joint choice, the dry run and `docs/scheduling.md` read it. A
region compares its options for one job by the same criteria as columns (`rms/criteria.py`), and the plain reference
(`rms/reference.py`) states them once more: a new criterion is a field here and a line in each of the two.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import Any

from pydantic import ConfigDict

JSON_CONFIG = ConfigDict(ser_json_inf_nan="strings")
"""JSON has no infinity: it travels as a string, and is read as a number again."""


class About(StrEnum):
    """What a criterion is about."""

    VICTIMS = "victims"
    """The work that is evicted."""
    PLACE = "place"
    """What the workload gets, as its document prefers it."""
    PACKING = "packing"
    """How compact the plan is."""


def _criterion(about: About, says: str, default: Any, *, adds: bool = True) -> Any:
    """A criterion. `adds`: the values of several workloads' plans can be added up."""
    return field(default=default, metadata={"about": about, "says": says, "adds": adds})


@dataclass(frozen=True, kw_only=True)
class PlanQuality:
    """What a plan is judged by. The order of the fields is the order of the criteria."""

    __pydantic_config__ = JSON_CONFIG

    victims_by_rank: tuple[int, ...] = _criterion(
        About.VICTIMS, "fewer victims of rank 1, then of rank 2, and so on; rank 8 is work over its quota", (0,) * 8
    )
    """At ranks 1 to 8. Plans that agree on it have equally many victims."""
    lost_gpu_s: float = _criterion(About.VICTIMS, "less lost work: GPU seconds since the victims' checkpoints", 0.0)
    youngest_victim_started_at_s: float = _criterion(
        About.VICTIMS, "the victim that started last started earlier", -inf, adds=False
    )
    """Minus infinity without victims."""
    spanning: int = _criterion(About.PLACE, "fewer jobs whose tasks span clusters", 0)
    type_preference: int = _criterion(
        About.PLACE, "GPU types that come earlier in the jobs' lists: the sum of their places", 0
    )
    capacity_preference: int = _criterion(
        About.PLACE, "kinds of capacity that come earlier in the document's list: the sum of their places over jobs", 0
    )
    usd_per_h: float = _criterion(About.PLACE, "a lower price an hour, at the prices of the clusters", 0.0)
    racks: int = _criterion(About.PACKING, "fewer racks", 0)
    machines: int = _criterion(About.PACKING, "fewer machines", 0)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The values in order. Ties are broken by the caller: region and machine ids."""
        return tuple(getattr(self, name) for name in _NAMES)

    @property
    def victims(self) -> int:
        """How many workloads are evicted."""
        return sum(self.victims_by_rank)


_NAMES = tuple(one.name for one in fields(PlanQuality))


def names(about: About, *, adding: bool = False) -> tuple[str, ...]:
    """The criteria about something, in order; only those whose values add up, if asked for."""
    return tuple(
        one.name
        for one in fields(PlanQuality)
        if one.metadata["about"] is about and (one.metadata["adds"] or not adding)
    )


def markdown() -> str:
    """The list as the documentation has it."""
    rows = [f"| {number} | {one.metadata['says']} |" for number, one in enumerate(fields(PlanQuality), 1)]
    last = "| | then the region that the slow path planned for it, and the ids of region and machines |"
    return "\n".join(["| | a plan comes first if it has |", "| --- | --- |", *rows, last])
