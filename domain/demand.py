"""The resource demand of a workload, which Postgres derives from the specification (column `workload.ask`)."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

from domain.capacity import USUAL
from domain.isolation import Isolation
from domain.scheduling import JobRequest
from domain.spread import SpreadLevel, SpreadRule
from domain.topology import TopologyRule


@dataclass(frozen=True)
class WorkloadDemand:
    """The parts of a specification that scheduling decisions use, except tenant and level, which can change."""

    jobs: tuple[JobRequest, ...]
    tables: tuple[str, ...] = ()
    allowed: frozenset[str] | None = None
    """Regions in which the workload may run; None: all."""
    excluded: frozenset[str] = frozenset()
    max_runtime_s: float = inf
    isolation: Isolation = Isolation.NONE
    """The weakest mode of isolation that its document allows; its tenant may require a stronger one."""
    has_image: bool = False
    """Whether a job brings a container image, so that its machines need an engine."""
    spread: SpreadRule | None = None

    def allows_region(self, region: str) -> bool:
        """Returns whether the user allows the workload to run in `region`."""
        return region not in self.excluded and (self.allowed is None or region in self.allowed)


@lru_cache(maxsize=50_000)
def demand_of(text: str) -> WorkloadDemand:
    """Parses `workload.ask`, in which a job is the list of the fields of `JobRequest` in order, without `capacity`.

    `capacity` is stored once for the whole workload. Results are cached, because many queued workloads have equal
    demands.

    Raises:
        ValueError: `text` is not what Postgres writes.
    """
    body = json.loads(text)
    jobs = [[_value(v) for v in job] for job in body.get("jobs", ())]
    capacity = tuple(body.get("capacity", USUAL))
    allowed, spread = body.get("allowed"), body.get("spread")
    return WorkloadDemand(
        tuple(replace(JobRequest(*job), capacity=capacity) for job in jobs),
        tuple(body.get("tables", ())),
        None if allowed is None else frozenset(allowed),
        frozenset(body.get("excluded", ())),
        float(body.get("max_runtime_s", inf)),
        Isolation(body.get("isolation", Isolation.NONE)),
        body.get("has_image", False),
        None if spread is None else SpreadRule(**{**spread, "over": SpreadLevel(spread["over"])}),
    )


def _value(field: Any) -> Any:
    if not isinstance(field, dict):
        return tuple(field) if isinstance(field, list) else field
    # Only `topology` is an object. Postgres omits its null fields.
    given: dict[str, Any] = {name: one if name == "slice_tasks" else SpreadLevel(one) for name, one in field.items()}
    return TopologyRule(**given)
