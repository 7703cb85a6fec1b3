"""The ordered criteria by which plans for one workload are compared (MAST 4.3). A smaller value is better.

The criteria are the fields of `PlanQuality`. The auction, the dry run and `docs/scheduling.md` use them. A region
compares its options for one job by the same criteria, stored as columns (`rms/plans.py`), and the reference
implementation (`reference/criteria.py`) repeats them. To add a criterion, add a field here and a line in each of these
two modules.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf
from typing import Any

from pydantic import ConfigDict

from domain.priority import LOWEST_RANK
from domain.spread import SpreadLevel

JSON_CONFIG = ConfigDict(ser_json_inf_nan="strings")
"""JSON has no infinity: it is written as a string and read back as a number."""


def _criterion(says: str, default: Any) -> Any:
    """Declares a criterion. `says`: a plan comes first if it has this."""
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True, kw_only=True)
class PlanQuality:
    """The values of all criteria for one plan. The order of the fields is the order of the criteria."""

    __pydantic_config__ = JSON_CONFIG

    victims_by_rank: tuple[int, ...] = _criterion(
        "fewer victims of rank 1, then of rank 2, and so on; ranks above 7 are over-quota work",
        (0,) * LOWEST_RANK,
    )
    """Number of victims at each rank from 1 to 14. Plans with equal values have equally many victims."""
    lost_gpu_s: float = _criterion("less lost work: GPU seconds since the victims' checkpoints", 0.0)
    youngest_victim_started_at_s: float = _criterion("an earlier start of the most recently started victim", -inf)
    """Minus infinity if the plan has no victims."""
    missing_tasks: int = _criterion("more tasks of an elastic job: fewer that are missing to its maximum", 0)
    spanning: int = _criterion("fewer jobs whose tasks span clusters", 0)
    apart: int = _criterion("fewer jobs whose tasks are not together at the level that they prefer", 0)
    type_preference: int = _criterion("GPU types that come earlier in the jobs' lists (the sum of their positions)", 0)
    capacity_preference: int = _criterion(
        "capacity kinds that come earlier in the document's list (the sum of their positions over all jobs)",
        0,
    )
    doubts: int = _criterion(
        "fewer lent machines that have not run anything yet; machines that did not start the last work that they got "
        "count twice",
        0,
    )
    away: int = _criterion(
        "fewer jobs that left an owner's machine and go to another cluster than the preferred one: the same building, "
        "if enough machines there have room",
        0,
    )
    move_s: float = _criterion(
        "a lower score of ReclaimNet's P2: expected seconds until these jobs run again, and of their next migration",
        0.0,
    )
    crowding: tuple[int, ...] = _criterion(
        "of replicas of services: fewer other replicas of the service on the same machine, then in the same rack, "
        "cluster and zone; the level that `spread` names comes first",
        (0,) * len(SpreadLevel),
    )
    """The numbers for the machine of the plan that has the largest ones, in the order of `SpreadRule.order`."""
    departures_per_h: float = _criterion(
        "fewer expected departures per hour of machines that owners lend, summed over all tasks",
        0.0,
    )
    usd_per_h: float = _criterion("a lower price per hour, by the prices of the clusters", 0.0)
    racks: int = _criterion("fewer racks", 0)
    machines: int = _criterion("fewer machines", 0)
    opened: int = _criterion("fewer machines of which all GPUs were free and some remain free", 0)
    """Machines that are whole before, and in pieces after the plan; those of each job are counted when it is placed."""
    pieces: int = _criterion("fewer GPUs that remain free on its machines", 0)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The values in order. The caller breaks ties by region and machine ids."""
        return tuple(getattr(self, name) for name in _NAMES)

    @property
    def before_move(self) -> tuple[Any, ...]:
        """The values of the criteria that come before the criterion `move_s` in the order of comparison."""
        return self.key[: _NAMES.index("move_s")]

    @property
    def victims(self) -> int:
        """The number of workloads that are evicted."""
        return sum(self.victims_by_rank)


_NAMES = tuple(one.name for one in fields(PlanQuality))
