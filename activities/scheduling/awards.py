"""The award (MAST 4.3): one transaction checks that plans' facts still hold, and takes their slots.

It takes as many plans as it is given, in queue order, with as many statements as for one; all of them are in the
database (`award_plans`, in the migrations), which is asked once. The allocation guard there is the judge of every slot,
as it is for all who write allocations.
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

from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, Plan
from domain.slots import plan_body, shares

_FIRST, _MOST = 16, 64
"""Awards of a batch's first transaction, and of any: others wait for what it locks, and after a plan that does not hold
the rest of it was in vain. Each that goes well is followed by one of twice its size."""
_AWARD = b"select awarded, gone from award_plans(%s::jsonb)"


@dataclass(frozen=True)
class PlannedAward:
    """A plan that is to be awarded."""

    plan: Plan
    rank: int
    jobs: tuple[JobRequest, ...]
    victims: Mapping[str, int] = field(default_factory=dict)
    """The plan's victims, each with the attempt that the bid is about."""


class Verdict(Enum):
    """Why an award stopped before its end."""

    STALE = "stale"
    """The facts of a plan do not hold any more."""
    GONE = "gone"
    """A workload is not queued any more, or somebody holds it."""


@dataclass(frozen=True)
class Awarded:
    """How far an award came: the first `count` awards are placed; `verdict` is about the next one."""

    count: int
    verdict: Verdict | None = None


@contextmanager
def connected(engine: Engine) -> Iterator[Connection[Any]]:
    """A connection for awards. It is the driver's own: what is between that and a session costs a third of an award."""
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
    except psycopg.OperationalError:
        pooled.invalidate()
        raise
    finally:
        pooled.close()


def award(connection: Connection[Any], awards: Iterable[PlannedAward]) -> Awarded:
    """Commits awards in queue order, many in one transaction, up to the first that cannot be.

    Of a long batch some are written while the next are asked for, and maybe found only then. After one that cannot be,
    no more are asked for than those.

    Nobody else loses by that one: what comes before it is placed, what comes after it has changed nothing, and its
    region may bid again before they do. Readers of events and mail are not woken (`infra.db.outbox.wake_readers` does).
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
    body = json.dumps([_body(planned) for planned in awards])
    try:
        found = connection.execute(_AWARD, (body,)).fetchone()
    except psycopg.IntegrityError:
        return _one_by_one(connection, awards)
    assert found is not None
    count, gone = found
    if gone is None:
        return Awarded(count)
    return Awarded(count, Verdict.GONE if gone else Verdict.STALE)


def _one_by_one(connection: Connection[Any], awards: Sequence[PlannedAward]) -> Awarded:
    """After the database's own refusal, which does not say of whom: a transaction for each, so that it shows."""
    for count, planned in enumerate(awards if len(awards) > 1 else ()):
        done = award(connection, [planned])
        if done.verdict is not None:
            return Awarded(count, done.verdict)
    return Awarded(len(awards)) if len(awards) > 1 else Awarded(0, Verdict.STALE)


def _body(planned: PlannedAward) -> dict[str, Any]:
    """An award as `award_plans` reads it."""
    plan, rank, victims = planned.plan, planned.rank, list(planned.plan.victims)
    wanted = shares(planned.jobs, plan.jobs)
    reason = Reason(ReasonCode.AWARDED, {"region": plan.region, "machines": len(wanted), "victims": len(victims)})
    waiting = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": victims, "region": plan.region})
    return {
        "workload": plan.workload,
        "rank": rank,
        "region": plan.region,
        "plan": {
            "jobs": plan_body(plan.jobs),
            "victims": victims,
            "rank": rank,
            "lost_gpu_s": plan.quality.lost_gpu_s,
        },
        "gpu_types": _gpu_types(planned),
        "cpus_milli": sum(job.cpus_milli for job in planned.jobs),
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
            out[job.gpu_type] = out.get(job.gpu_type, 0) + request.gpus
    return out
