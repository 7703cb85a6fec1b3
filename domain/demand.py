"""What a workload asks of the schedulers, as Postgres derives it from its specification (`workload.ask`)."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

from domain.capacity import USUAL
from domain.scheduling import JobRequest


@dataclass(frozen=True)
class WorkloadDemand:
    """All of a specification that decisions look at, except for tenant and level, which may change."""

    jobs: tuple[JobRequest, ...]
    tables: tuple[str, ...] = ()
    allowed: frozenset[str] | None = None
    """Regions where it may run; None: anywhere."""
    excluded: frozenset[str] = frozenset()
    max_runtime_s: float = inf

    def allows_region(self, region: str) -> bool:
        """Whether the user lets it run in `region`."""
        return region not in self.excluded and (self.allowed is None or region in self.allowed)


@lru_cache(maxsize=50_000)
def demand_of(text: str) -> WorkloadDemand:
    """Reads `workload.ask`, where a job is the list of the fields of `JobRequest` in their order, without the
    kinds of capacity, which the whole workload has.

    Queues repeat themselves, so most strings are known already.

    Raises:
        ValueError: it is not what Postgres writes.
    """
    body = json.loads(text)
    jobs: list[list[Any]] = [[tuple(v) if isinstance(v, list) else v for v in job] for job in body.get("jobs", ())]
    capacity = tuple(body.get("capacity", USUAL))
    allowed = body.get("allowed")
    return WorkloadDemand(
        tuple(replace(JobRequest(*job), capacity=capacity) for job in jobs),
        tuple(body.get("tables", ())),
        None if allowed is None else frozenset(allowed),
        frozenset(body.get("excluded", ())),
        float(body.get("max_runtime_s", inf)),
    )
