"""What a workload asks of the schedulers, as Postgres derives it from its specification (`workload.ask`)."""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from domain.scheduling import JobRequest


@dataclass(frozen=True)
class Ask:
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
def ask_of(text: str) -> Ask:
    """Reads `workload.ask`. Queues repeat themselves, so most texts are known already.

    Raises:
        ValueError: it is not what Postgres writes.
    """
    body = json.loads(text)
    jobs = tuple(
        JobRequest(name, int(tasks), int(gpus), tuple(types), int(cpus_milli), int(memory_bytes), bool(spans))
        for name, tasks, gpus, types, cpus_milli, memory_bytes, spans in body.get("jobs", ())
    )
    allowed = body.get("allowed")
    return Ask(
        jobs,
        tuple(body.get("tables", ())),
        None if allowed is None else frozenset(allowed),
        frozenset(body.get("excluded", ())),
        float(body.get("max_runtime_s", inf)),
    )
