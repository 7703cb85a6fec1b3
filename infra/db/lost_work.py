"""Computes the work that an interruption of an attempt loses, from the attempt's row, and sums what was lost."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Index, func, select, text
from sqlalchemy.orm import Session

from domain.lifecycle.retry_limits import PREEMPTIONS
from domain.lost_work import lost_work_s
from infra.db.models import Attempt, Workload

_IS_PREEMPTED = f"outcome ->> 'code' in ({', '.join(repr(code.value) for code in sorted(PREEMPTIONS))})"
"""SQL: whether an attempt was preempted. Its text is the same in the index and in the query, so that this uses it."""
Index("attempt_preempted", Attempt.released_at, postgresql_where=text(_IS_PREEMPTED))


def lost_by(attempt: Attempt, until_s: float) -> float:
    """Returns the seconds of work that an interruption at `until_s` (epoch seconds) loses (`domain.lost_work`).

    For a replica of a service that has been ready, it is its cold start.
    """
    if attempt.cold_start_s is not None:
        return attempt.cold_start_s
    return lost_work_s(
        began_s=None if attempt.started_at is None else attempt.started_at.timestamp(),
        saved_s=None if attempt.checkpoint_at is None else attempt.checkpoint_at.timestamp(),
        until_s=until_s,
        step=attempt.last_step,
        saved_step=attempt.checkpoint_step if attempt.checkpoint_step is not None else attempt.resumed_step,
        step_s=(attempt.cadence or {}).get("step_s"),
    )


@dataclass(frozen=True)
class PreemptedWork:
    """The work of a workload that preemptions have lost since some time."""

    workload: str
    name: str
    tenant: str
    preemptions: int
    lost_s: float
    all_preemptions: int
    """Of all workloads together."""
    all_lost_s: float


def preempted_since(session: Session, since: datetime, tenant: str | None, limit: int) -> list[PreemptedWork]:
    """Returns the `limit` workloads, of all tenants or of one, that lost most in preemptions since `since`."""
    lost = func.coalesce(func.sum(Attempt.lost_s), 0.0)
    wanted = (
        select(
            Attempt.workload, Workload.name, Workload.tenant, func.count(), lost,
            func.sum(func.count()).over(), func.sum(lost).over(),
        )
        .join(Workload, Workload.id == Attempt.workload)
        .where(Attempt.released_at >= since, text(_IS_PREEMPTED))
        .group_by(Attempt.workload, Workload.name, Workload.tenant)
        .order_by(lost.desc(), Attempt.workload)
        .limit(limit)
    )  # fmt: skip
    if tenant is not None:
        wanted = wanted.where(Workload.tenant == tenant)
    rows: list[tuple[Any, ...]] = [tuple(row) for row in session.execute(wanted)]
    return [PreemptedWork(*row) for row in rows]
