"""The award (MAST 4.3): a transaction checks that the facts of plans still hold, and takes their slots.

One call of the SQL function `award_plans` (in the migrations) awards several plans in queue order. The number of its
statements does not depend on the number of plans. As for every write of allocations, the allocation guard in the
database refuses overlapping slots.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import psycopg
from psycopg import Connection
from sqlalchemy import Engine

from activities.scheduling.scan_result import WaitingElement
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, Plan
from domain.slots import plan_body, shares

_FIRST, _MOST = 16, 64
"""The number of awards in the first transaction of a batch, and the maximum. The size doubles after each success. Small
transactions hold their locks for a short time, and waste less work if a plan fails."""
AWARD = "select awarded, gone from award_plans(cast({} as jsonb))"
"""The award of candidates (`body_of`), as SQL with a placeholder for the parameter."""
_AWARD = AWARD.format("%s").encode()


@dataclass(frozen=True)
class PlannedAward:
    """A plan to be awarded."""

    plan: Plan
    rank: int
    jobs: tuple[JobRequest, ...]
    victims: Mapping[str, int] = field(default_factory=dict)
    """The plan's victims, each with the number of the attempt to evict."""
    element: WaitingElement | None = None
    """Set if the workload is an element of an array that gets its row with the award."""


class AwardFailure(Enum):
    """Why an award was not committed."""

    STALE = "stale"
    """The facts of the plan have changed."""
    GONE = "gone"
    """The workload is not queued any more, or is on hold."""


@dataclass(frozen=True)
class Awarded:
    """The result of a series of awards: the first `count` are committed; `verdict` is why the next one failed."""

    count: int
    verdict: AwardFailure | None = None


@contextmanager
def connected(engine: Engine) -> Iterator[Connection[Any]]:
    """Opens a connection for awards, as the driver's connection: a session adds a third to the time of an award."""
    pooled = engine.raw_connection()
    try:
        driver = pooled.driver_connection
        assert isinstance(driver, Connection)
        driver.autocommit = True
        try:
            yield driver
        finally:
            if not driver.closed:
                driver.autocommit = False
    except BaseException:  # Also an interruption in the middle of a statement: the connection's state is unknown.
        pooled.invalidate()
        raise
    finally:
        pooled.close()


def award(connection: Connection[Any], awards: Iterable[PlannedAward]) -> Awarded:
    """Commits awards in queue order, many in one transaction, up to the first that fails.

    In a long batch, one chunk is committed while the next chunk is computed from `awards`. So after a failure at most
    one extra chunk has been consumed.

    The awards before the failed one are committed, and the awards after it have changed nothing. This function does not
    wake the readers of events and of the outbox; the caller calls `infra.db.outbox.wake_readers`.
    """
    rest, size, count = iter(awards), _FIRST, 0
    some = list(islice(rest, size))
    if len(some) < size:
        return _award_some(connection, some) if some else Awarded(0)
    with ThreadPoolExecutor(1, "award") as writer:
        while some:
            writing = writer.submit(_award_some, connection, some)
            size = min(2 * size, _MOST)
            some = list(islice(rest, size))
            done = writing.result()
            count += done.count
            if done.verdict is not None:
                return Awarded(count, done.verdict)
    return Awarded(count)


def _award_some(connection: Connection[Any], awards: Sequence[PlannedAward]) -> Awarded:
    body = json.dumps([body_of(planned) for planned in awards])
    try:
        found = connection.execute(_AWARD, (body,)).fetchone()
    except psycopg.IntegrityError:
        return _one_by_one(connection, awards)
    assert found is not None
    count, gone = found
    if gone is None:
        return Awarded(count)
    return Awarded(count, AwardFailure.GONE if gone else AwardFailure.STALE)


def _one_by_one(connection: Connection[Any], awards: Sequence[PlannedAward]) -> Awarded:
    """Commits each award in its own transaction, to find the one that violates a constraint of the database."""
    for count, planned in enumerate(awards if len(awards) > 1 else ()):
        done = award(connection, [planned])
        if done.verdict is not None:
            return Awarded(count, done.verdict)
    return Awarded(len(awards)) if len(awards) > 1 else Awarded(0, AwardFailure.STALE)


def body_of(planned: PlannedAward) -> dict[str, Any]:
    """Returns the JSON body of an award for `award_plans`."""
    plan, rank, victims = planned.plan, planned.rank, list(planned.plan.victims)
    element = planned.element
    wanted = shares(planned.jobs, plan.jobs)
    reason = Reason(ReasonCode.AWARDED, {"region": plan.region, "machines": len(wanted), "victims": len(victims)})
    waiting = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": victims, "region": plan.region})
    return {
        "workload": plan.workload,
        "element": element and {"head": element.array, "position": element.position, "index": element.index},
        "rank": rank,
        "region": plan.region,
        "plan": {
            "jobs": plan_body(plan.jobs),
            "victims": victims,
            "rank": rank,
            "lost_gpu_s": plan.quality.lost_gpu_s,
        },
        "gpu_types": _gpu_types(planned),
        "cpus_milli": sum(j.tasks * r.cpus_milli_per_task for r, j in zip(planned.jobs, plan.jobs, strict=True)),
        "machines": [
            {"machine": m, "gpus": s.gpus, "cpus_milli": s.cpus_milli, "memory_bytes": s.memory_bytes}
            for m, s in wanted.items()
        ],
        "victims": [{"victim": v, "attempt": planned.victims.get(v)} for v in victims],
        "reason": reason.to_json(),
        "waiting_reason": waiting.to_json() if victims else None,
        "detail": {"machines": sorted(wanted), "victims": victims, "rank": rank},
    }


def _gpu_types(planned: PlannedAward) -> dict[str, int]:
    out: dict[str, int] = {}
    for request, job in zip(planned.jobs, planned.plan.jobs, strict=True):
        if job.gpu_type is not None and request.gpus:
            out[job.gpu_type] = out.get(job.gpu_type, 0) + job.tasks * request.gpus_per_task
    return out
