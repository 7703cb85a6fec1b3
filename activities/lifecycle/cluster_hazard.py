"""The hazard of clusters: how often machines of a cluster were interrupted lately. Launch descriptions contain it."""

import time
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.hazard import hazard_per_h
from domain.reasons import ReasonCode
from infra.db.models import Machine

_INTERRUPTIONS = (ReasonCode.MACHINE_LOST, ReasonCode.PLATFORM_NOTICE)
_WINDOW = timedelta(days=14)
"""The window in which interruptions are counted. Older ones say little about a zone: its prices and users change."""
_HAZARD_KEPT_S = 60.0
"""The time for which a cluster's hazard is cached. It changes slowly, and the query is expensive."""

_SEEN = text(
    "with ran as (select a.workload, a.attempt, a.outcome ->> 'code' as code,"
    " a.outcome -> 'detail' ->> 'machine' as machine,"
    " extract(epoch from coalesce(a.released_at, now()) - greatest(a.started_at, now() - :window)) / 3600 as h"
    " from attempt as a where a.region = :region and a.started_at is not null"
    " and (a.released_at is null or a.released_at > now() - :window))"
    " select count(distinct (workload, attempt)) filter ("
    " where ran.code = any(:codes) and starts_with(ran.machine, :prefix)), coalesce(sum(greatest(ran.h, 0)), 0)"
    " from ran join allocation as l using (workload, attempt) where starts_with(l.machine, :prefix)"
)
"""Returns the interruptions of a cluster's machines in the window, and the machine hours of its attempts."""


class ClusterHazards:
    """The hazards of all clusters, each cached for `_HAZARD_KEPT_S`."""

    def __init__(self) -> None:
        self._cached: dict[tuple[str, str], tuple[float, float | None]] = {}
        """The hazard of each cluster (region, name), with the expiry time of the entry (monotonic clock)."""

    def mean(self, session: Session, machines: Sequence[Machine]) -> float | None:
        """Returns the mean hazard of the machines' clusters, in interruptions per machine hour in the window.

        None: for at least one cluster there are too few observations.
        """
        found = [self._of(session, machine.region, machine.cluster) for machine in machines]
        known = [hazard for hazard in found if hazard is not None]
        return sum(known) / len(known) if known and len(known) == len(found) else None

    def _of(self, session: Session, region: str, cluster: str) -> float | None:
        """Returns the hazard of a cluster. It depends on zone and capacity kind, which a cluster's machines share.

        Lost machines and machines that their platform reclaimed count as interruptions. Evictions, drains and
        operators' preemptions do not count: tasks have their grace to save, and the zone is not the cause.
        """
        until_s, hazard = self._cached.get((region, cluster), (0.0, None))
        if time.monotonic() < until_s:
            return hazard
        values = {
            "region": region,
            "prefix": f"{region}/{cluster}/",
            "codes": [c.value for c in _INTERRUPTIONS],
            "window": _WINDOW,
        }
        interruptions, machine_h = session.execute(_SEEN, values).one()
        hazard = hazard_per_h(int(interruptions), float(machine_h))
        self._cached[region, cluster] = time.monotonic() + _HAZARD_KEPT_S, hazard
        return hazard
