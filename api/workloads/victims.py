"""The workloads that a workload has evicted."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Caller
from infra.db.models import Eviction, Workload


@dataclass(frozen=True)
class EvictedVictim:
    """One eviction. Without id and name, it was of a workload that the caller may not see."""

    at: datetime
    attempt: int
    """The attempt of the evictor that got the slots."""
    workload: str | None
    name: str | None


def victims_of(session: Session, caller: Caller, evictor: str, limit: int) -> list[EvictedVictim]:
    """Returns the last `limit` evictions by a workload that the caller may see, newest first."""
    found = session.execute(
        select(Eviction.at, Eviction.evictor_attempt, Workload.id, Workload.name, Workload.tenant)
        .join(Workload, Workload.id == Eviction.victim)
        .where(Eviction.evictor == evictor)
        .order_by(Eviction.at.desc(), Eviction.victim)
        .limit(limit)
    )
    return [
        EvictedVictim(at, attempt, *((id_, name) if caller.sees(tenant) else (None, None)))
        for at, attempt, id_, name, tenant in found
    ]
