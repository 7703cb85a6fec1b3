"""The hazards of clusters: how often machines and processes were lost lately. Launch descriptions contain them."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.hazard import hazard_per_h
from domain.reasons import ReasonCode
from infra.db.models import Machine

_INTERRUPTIONS = (ReasonCode.MACHINE_LOST, ReasonCode.PLATFORM_NOTICE)
_FAILURES = (
    ReasonCode.TASK_FAILED,
    ReasonCode.OUT_OF_MEMORY,
    ReasonCode.NO_PROGRESS,
    ReasonCode.UNCONFIRMED_FAILURE,
    ReasonCode.RETRIES_EXHAUSTED,
)
"""Ends of attempts whose machines remain. They count only after a checkpoint: a script that always fails at its start
says nothing about trainings."""
_WINDOW = timedelta(days=14)
"""The window in which interruptions are counted. Older ones say little about a zone: its prices and users change."""
_TOGETHER = timedelta(minutes=10)
"""Two machines that are lost within this time are lost together: the first has not been replaced before."""
_HAZARD_KEPT_S = 60.0
"""The time for which a cluster's hazard is cached. It changes slowly, and the query is expensive."""

_SEEN = text(
    "with ran as (select a.workload, a.attempt, a.outcome ->> 'code' as code, a.released_at,"
    " a.checkpoint_step is not null as saved, a.outcome -> 'detail' ->> 'machine' as machine,"
    " greatest(extract(epoch from coalesce(a.released_at, now()) - greatest(a.started_at, now() - :window)), 0)"
    " / 3600 as h from attempt as a where a.region = :region and a.started_at is not null"
    " and (a.released_at is null or a.released_at > now() - :window)),"
    " here as (select ran.*, l.machine as held, code = any(:codes) and starts_with(ran.machine, :prefix) as lost"
    " from ran join allocation as l using (workload, attempt) where starts_with(l.machine, :prefix)),"
    " losses as (select machine, max(released_at) as at from here where lost group by workload, attempt, machine)"
    " select count(distinct (workload, attempt)) filter (where lost), coalesce(sum(h), 0),"
    " count(distinct (workload, attempt)) filter (where saved and (lost or code = any(:failures))),"
    " coalesce(sum(h) filter (where saved), 0), count(distinct held),"
    " (select count(distinct (one.machine, other.machine, one.at)) from losses as one join losses as other"
    " on one.machine <> other.machine and other.at >= one.at and other.at < one.at + :together"
    " and (other.at > one.at or one.machine < other.machine)) from here"
)
"""Returns, for a cluster and the window: interruptions of its machines, and the machine hours of its attempts; losses
of processes, and machine hours, of attempts that have saved; the machines, and pairs of them that were lost together.
"""


class LossRates(NamedTuple):
    """Rates for each machine hour; None: too few observations for an estimate."""

    machine_per_h: float | None = None
    """Losses of a machine."""
    process_per_h: float | None = None
    """Losses of a process that has saved, with or without its machine."""
    both_per_h: float | None = None
    """Losses of a machine together with a given other machine of its cluster."""


class ClusterHazards:
    """The hazards of all clusters, each cached for `_HAZARD_KEPT_S`."""

    def __init__(self) -> None:
        self._cached: dict[tuple[str, str], tuple[float, LossRates]] = {}
        """The hazards of each cluster (region, name), with the expiry time of the entry (monotonic clock)."""

    def mean(self, session: Session, machines: Sequence[Machine]) -> LossRates:
        """Returns the mean hazards of the machines' clusters in the window.

        A rate is None if for at least one cluster there are too few observations.
        """
        found = [self._of(session, machine.region, machine.cluster) for machine in machines]
        return LossRates(*(_mean(rates) for rates in zip(*found, strict=True))) if found else LossRates()

    def _of(self, session: Session, region: str, cluster: str) -> LossRates:
        """Returns the hazards of a cluster. They depend on zone and capacity kind, which a cluster's machines share.

        Lost machines and machines that their platform reclaimed count as interruptions. Evictions, drains and
        operators' preemptions do not count: tasks have their grace to save, and the zone is not the cause.
        """
        until_s, hazards = self._cached.get((region, cluster), (0.0, LossRates()))
        if time.monotonic() < until_s:
            return hazards
        values = {
            "region": region,
            "prefix": f"{region}/{cluster}/",
            "codes": [c.value for c in _INTERRUPTIONS],
            "failures": [c.value for c in _FAILURES],
            "window": _WINDOW,
            "together": _TOGETHER,
        }
        lost, machine_h, processes, saved_h, machines, pairs = session.execute(_SEEN, values).one()
        both = hazard_per_h(int(pairs), float(machine_h)) if machines > 1 else None
        hazards = LossRates(
            hazard_per_h(int(lost), float(machine_h)),
            hazard_per_h(int(processes), float(saved_h)),
            # Each pair has two machines, and each machine is in one pair with each other machine.
            None if both is None else both * 2 / (machines - 1),
        )
        self._cached[region, cluster] = time.monotonic() + _HAZARD_KEPT_S, hazards
        return hazards


def _mean(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known and len(known) == len(rates) else None
