"""Finds workloads that wait only for machines, from the last scan and the regions' reasons."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from capacity.scaling import MOST_SHORTAGES, Shortage
from domain.demand import demand_of
from domain.phases import QUEUED_PHASES
from domain.reasons import ReasonCode
from infra.db import published_queue
from infra.db.logs import Waiting
from infra.db.models import Workload

_FOR_WANT_OF_MACHINES = {
    ReasonCode.INSUFFICIENT_CAPACITY.value,
    ReasonCode.NO_HARDWARE.value,
    ReasonCode.REFUSED_LIKE.value,
}


def read_shortages(session: Session, queue: published_queue.Newest) -> list[Shortage]:
    """Returns the workloads for which no region has room, in queue order.

    Workloads that are held or over-quota are left out. A region is listed only if it lacks nothing but machines: a
    region that does not answer, or that lacks the workload's data, is left out.
    """
    newest = queue.load(session)
    rows = session.execute(
        select(Workload.id, Workload.ask, Waiting.reasons)
        .join(Waiting, Waiting.workload == Workload.id)
        .where(Workload.phase.in_(sorted(QUEUED_PHASES)), Workload.finished_at.is_(None), Workload.held_by.is_(None))
    ).all()
    entries = newest.find_all([row.id for row in rows])
    ranked = sorted(
        (entries[row.id].position, row) for row in rows if row.id in entries and not entries[row.id].over_quota
    )
    out = []
    for _, row in ranked[:MOST_SHORTAGES]:
        regions = _regions(row.reasons)
        if regions and row.ask is not None:
            out.append(Shortage(row.id, demand_of(row.ask).jobs, regions))
    return out


def _regions(body: Mapping[str, Any]) -> frozenset[str]:
    """Returns the regions that lack only machines."""
    codes: dict[str, set[str]] = {}
    for reason in body.get("reasons", ()):
        if (region := (reason.get("detail") or {}).get("region")) is not None:
            codes.setdefault(region, set()).add(reason["code"])
    return frozenset(region for region, found in codes.items() if found <= _FOR_WANT_OF_MACHINES)
