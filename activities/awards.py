"""The award (MAST 4.3): one transaction checks that plans' facts still hold, and takes their slots.

It takes as many plans as it is given, in queue order, with as many statements as for one; all of them are in the
database (`award_plans`, in the migrations), which is asked once. The allocation guard there is the judge of every slot,
as it is for all who write allocations.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import psycopg
from psycopg import Connection
from sqlalchemy import Engine

from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, Plan
from domain.slots import plan_body, shares

_AT_ONCE = 100
"""Awards of one transaction at most: others wait for what it locks."""
_AWARD = b"select awarded, gone from award_plans(%s::jsonb)"


@dataclass(frozen=True)
class Candidate:
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
    """How far an award came: the first `count` candidates are placed; `verdict` is about the next one."""

    count: int
    verdict: Verdict | None = None


def award(engine: Engine, candidates: Sequence[Candidate]) -> Awarded:
    """Awards candidates in queue order, many in one transaction, up to the first that cannot be.

    Nobody else loses by that one: what comes before it is placed, what comes after it has changed nothing, and its
    region may bid again before they do. Readers of events and mail are not woken (`infra.db.outbox.wake_readers` does).
    """
    for first in range(0, len(candidates), _AT_ONCE):
        done = _award_some(engine, candidates[first : first + _AT_ONCE])
        if done.verdict is not None:
            return Awarded(first + done.count, done.verdict)
    return Awarded(len(candidates))


def _award_some(engine: Engine, candidates: Sequence[Candidate]) -> Awarded:
    body = json.dumps([_body(candidate) for candidate in candidates])
    try:
        with _connection(engine) as connection:
            found = connection.execute(_AWARD, (body,)).fetchone()
    except psycopg.IntegrityError:
        return _one_by_one(engine, candidates)
    assert found is not None
    count, gone = found
    if gone is None:
        return Awarded(count)
    return Awarded(count, Verdict.GONE if gone else Verdict.STALE)


@contextmanager
def _connection(engine: Engine) -> Iterator[Connection[Any]]:
    """The driver's own connection: what is between it and a session costs a third of an award."""
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


def _one_by_one(engine: Engine, candidates: Sequence[Candidate]) -> Awarded:
    """After the database's own refusal, which does not say of whom: a transaction for each, so that it shows."""
    for count, candidate in enumerate(candidates if len(candidates) > 1 else ()):
        done = award(engine, [candidate])
        if done.verdict is not None:
            return Awarded(count, done.verdict)
    return Awarded(len(candidates)) if len(candidates) > 1 else Awarded(0, Verdict.STALE)


def _body(candidate: Candidate) -> dict[str, Any]:
    """A candidate as `award_plans` reads it."""
    plan, rank, victims = candidate.plan, candidate.rank, list(candidate.plan.victims)
    wanted = shares(candidate.jobs, plan.jobs)
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
        "gpu_types": _gpu_types(candidate),
        "cpus_milli": sum(job.cpus_milli for job in candidate.jobs),
        "machines": [
            {"machine": m, "gpus": s.gpus, "cpus_milli": s.cpus_milli, "memory_bytes": s.memory_bytes}
            for m, s in wanted.items()
        ],
        "victims": [{"victim": v, "attempt": candidate.victims.get(v)} for v in victims],
        "reason": reason.to_json(),
        "waiting_reason": waiting.to_json() if victims else None,
        "detail": {"machines": sorted(wanted), "victims": victims, "rank": rank},
    }


def _gpu_types(candidate: Candidate) -> dict[str, int]:
    out: dict[str, int] = {}
    for request, job in zip(candidate.jobs, candidate.plan.jobs, strict=True):
        if job.gpu_type is not None and request.gpus:
            out[job.gpu_type] = out.get(job.gpu_type, 0) + request.gpus
    return out
