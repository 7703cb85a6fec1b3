"""The award (MAST 4.3): one transaction checks that plans' facts still hold, and takes their slots.

It takes as many plans as it is given, in queue order, with as many statements as for one. The allocation guard in the
database is the judge of every slot, as it is for all who write allocations.
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

from activities import slots
from domain.phases import QUEUED_PHASES, Phase
from domain.protocol import MailKind
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, Plan
from infra.db import events, outbox

_QUEUED = sorted(QUEUED_PHASES)
_AT_ONCE = 100
"""Awards of one transaction at most: others wait for what it locks."""


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
    region may bid again before they do.
    """
    for first in range(0, len(candidates), _AT_ONCE):
        done = _award_some(engine, candidates[first : first + _AT_ONCE])
        if done.verdict is not None:
            return Awarded(first + done.count, done.verdict)
    return Awarded(len(candidates))


def _award_some(engine: Engine, candidates: Sequence[Candidate]) -> Awarded:
    try:
        with _connection(engine) as connection, connection.transaction():
            return _award(connection, candidates)
    except psycopg.IntegrityError:
        return _one_by_one(engine, candidates)


@contextmanager
def _connection(engine: Engine) -> Iterator[Connection[Any]]:
    """The driver's own connection: what is between it and a session costs a third of an award."""
    pooled = engine.raw_connection()
    try:
        driver = pooled.driver_connection
        assert isinstance(driver, Connection)
        yield driver
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


@dataclass
class _Workload:
    tenant: str
    attempt: int
    queued: bool


@dataclass
class _Victim:
    """A victim's newest attempt."""

    number: int
    rank: int
    leaving: bool
    """It is released, or somebody evicts it already."""


@dataclass
class _Machine:
    takes_work: bool
    all_slots: int
    held: int
    promised: int
    free_cpus_milli: int
    free_memory_bytes: int


_Rows = list[dict[str, Any]]


@dataclass
class _Writes:
    """What an award will write, by table."""

    attempts: _Rows = field(default_factory=list)
    evictions: _Rows = field(default_factory=list)
    allocations: _Rows = field(default_factory=list)
    events: _Rows = field(default_factory=list)
    mails: _Rows = field(default_factory=list)


def _award(connection: Connection[Any], candidates: Sequence[Candidate]) -> Awarded:
    facts = _Facts(connection, candidates)
    writes = _Writes()
    done = Awarded(len(candidates))
    for count, candidate in enumerate(candidates):
        verdict = facts.judge(candidate, writes)
        if verdict is not None:
            done = Awarded(count, verdict)
            break
    if done.count:
        _write(connection, writes)
    return done


class _Facts:
    """What plans rest on, locked in the order of `activities.slots`, and what earlier plans of the award change."""

    def __init__(self, connection: Connection[Any], candidates: Sequence[Candidate]) -> None:
        own = [c.plan.workload for c in candidates]
        victims = sorted({v for c in candidates for v in c.plan.victims})
        machines = sorted({m for c in candidates for job in c.plan.jobs for m, _ in job.machines})

        def ask(query: str, *params: Sequence[str]) -> list[tuple[Any, ...]]:
            return connection.execute(query.encode(), params).fetchall()

        self._workloads: dict[str, _Workload] = {}
        self._machines: dict[str, _Machine] = {}
        for id_, tenant, good, *numbers in ask(_LOCK, _QUEUED, sorted({*own, *victims}), machines):
            if tenant is not None:
                self._workloads[id_] = _Workload(tenant, numbers[0], good)
            else:
                self._machines[id_] = _Machine(good, *numbers)
        self._victims: dict[str, _Victim] = {}
        self._enemies: set[tuple[Any, ...]] = set()
        self._given_up: dict[tuple[str, str], tuple[int, int, int]] = {}
        """(victim, machine) to slots, CPUs and memory that it holds there."""
        if victims:
            # Read without locks of their own: the workloads', which are held, keep all that is asked as it is.
            self._victims = {id_: _Victim(*row) for id_, *row in ask(_NEWEST, victims)}
            self._enemies = set(ask(_ENEMIES, own))
            self._given_up = {(v, m): (s, c, b) for v, m, s, c, b in ask(_HOLDINGS, victims, machines)}

    def judge(self, candidate: Candidate, writes: _Writes) -> Verdict | None:
        """Notes what the award of one candidate writes; or why it cannot be, and nothing."""
        plan = candidate.plan
        row = self._workloads.get(plan.workload)
        if row is None or not row.queued:
            return Verdict.GONE
        for victim in plan.victims:
            found = self._victims.get(victim)
            if found is None or found.leaving or found.number != candidate.victims.get(victim):
                return Verdict.STALE
            if (plan.workload, victim) in self._enemies:
                return Verdict.STALE
        attempt = row.attempt + 1
        try:
            taken = self._take(candidate, attempt)
        except slots.StalePlan:
            return Verdict.STALE
        for machine, new in taken.machines.items():
            self._machines[machine] = new
        row.attempt, row.queued = attempt, False
        self._note(candidate, attempt, row.tenant, taken, writes)
        return None

    def _take(self, candidate: Candidate, attempt: int) -> "_Taken":
        """Free resources first, the rest as successor of the victims.

        Raises:
            StalePlan: a machine takes no work, or what the plan counts on is not there any more.
        """
        plan, taken = candidate.plan, _Taken()
        for machine_id, share in slots.shares(candidate.jobs, plan.jobs).items():
            machine = self._machines.get(machine_id)
            if machine is None or not machine.takes_work:
                raise slots.StalePlan(f"machine {machine_id} takes no work now")
            given = [self._given_up.get((victim, machine_id), (0, 0, 0)) for victim in plan.victims]
            given_slots = sum(s for s, _, _ in given)  # Disjoint: a slot has one holder.
            own = slots.lowest_bits(machine.all_slots & ~machine.held, share.gpus)
            awaited = slots.lowest_bits(given_slots & ~machine.promised, share.gpus - own.bit_count())
            awaited_cpus = max(0, share.cpus_milli - machine.free_cpus_milli)
            awaited_memory = max(0, share.memory_bytes - machine.free_memory_bytes)
            if (
                own.bit_count() + awaited.bit_count() < share.gpus
                or awaited_cpus > sum(c for _, c, _ in given)
                or awaited_memory > sum(b for _, _, b in given)
            ):
                raise slots.StalePlan(f"machine {machine_id} has less free than the plan counts on")
            complete = not (awaited or awaited_cpus or awaited_memory)
            taken.ready = taken.ready and complete
            taken.machines[machine_id] = _Machine(
                True,
                machine.all_slots,
                machine.held | own,
                machine.promised | awaited,
                machine.free_cpus_milli - share.cpus_milli + awaited_cpus,
                machine.free_memory_bytes - share.memory_bytes + awaited_memory,
            )
            taken.allocations.append(
                {
                    "workload": plan.workload, "attempt": attempt, "machine": machine_id, "slots": own,
                    "awaited": awaited, "cpus_milli": share.cpus_milli, "awaited_cpus_milli": awaited_cpus,
                    "memory_bytes": share.memory_bytes, "awaited_memory_bytes": awaited_memory,
                    "tasks": {"tasks": slots.slots_of_tasks(share, slots.bits(own | awaited))}, "complete": complete,
                }
            )  # fmt: skip
        return taken

    def _note(self, candidate: Candidate, attempt: int, tenant: str, taken: "_Taken", writes: _Writes) -> None:
        """The rest of the award: the phase, the attempt, who is told, and who evicts whom."""
        plan, rank = candidate.plan, candidate.rank
        machines = list(taken.machines)
        reason = Reason(
            ReasonCode.AWARDED, {"region": plan.region, "machines": len(machines), "victims": len(plan.victims)}
        )
        if not taken.ready:
            reason = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": list(plan.victims), "region": plan.region})
        own = {"workload": plan.workload, "attempt": attempt, "region": plan.region}
        writes.attempts.append(
            {
                **own, "plan": _plan_body(plan, rank), "ready": taken.ready, "gpu_types": _gpu_types(candidate),
                "cpus_milli": sum(job.cpus_milli for job in candidate.jobs), "rank": rank,
            }
        )  # fmt: skip
        writes.allocations += taken.allocations
        for victim in plan.victims:
            found = self._victims[victim]
            found.leaving = True
            writes.evictions.append(
                {"evictor": plan.workload, "evictor_attempt": attempt, "victim": victim, "victim_attempt": found.number}
            )
            told = {"evictor": plan.workload, "evictor_rank": rank, "rank": found.rank}
            writes.mails.append(_mail(victim, MailKind.EVICT, found.number, told))
        detail = {"machines": machines, "victims": list(plan.victims), "rank": rank}
        writes.events.append(
            {
                **own, "tenant": tenant, "reason": reason.to_json(), "detail": detail,
                "dedup": f"{attempt}:{Phase.PLACING.value}",
            }
        )  # fmt: skip
        awarded = {"ready": taken.ready, "region": plan.region, "rank": rank}
        writes.mails.append(_mail(plan.workload, MailKind.AWARDED, attempt, awarded))


@dataclass
class _Taken:
    """What one plan takes."""

    machines: dict[str, _Machine] = field(default_factory=dict)
    """As they are then, by id."""
    allocations: _Rows = field(default_factory=list)
    ready: bool = True
    """It holds everything at once."""


def _plan_body(plan: Plan, rank: int) -> dict[str, Any]:
    return {
        "jobs": [
            {"job": j.job, "cluster": j.cluster, "gpu_type": j.gpu_type, "machines": list(j.machines)}
            for j in plan.jobs
        ],
        "victims": list(plan.victims),
        "rank": rank,
        "lost_gpu_s": plan.quality.lost_gpu_s,
    }


def _gpu_types(candidate: Candidate) -> dict[str, int]:
    out: dict[str, int] = {}
    for request, job in zip(candidate.jobs, candidate.plan.jobs, strict=True):
        if job.gpu_type is not None and request.gpus:
            out[job.gpu_type] = out.get(job.gpu_type, 0) + request.gpus
    return out


def _mail(workload: str, kind: MailKind, attempt: int, detail: Mapping[str, object]) -> dict[str, Any]:
    return {"workload": workload, "body": {"kind": kind.value, "attempt": attempt, "detail": detail}}


# The parts of a union are carried out in their order: workloads are locked before machines, each by id.
_LOCK = """
    select * from (
        select id, tenant, phase = any(%s) and held_by is null, attempt, null::bigint, null::bigint, null::bigint,
               null::bigint
        from workload where id = any(%s) order by id for update) as workloads
    union all
    select * from (
        select id, null, state = 'ready' and cordon is null and not draining, (1::bigint << gpus::int) - 1, held,
               promised, free_cpus_milli, free_memory_bytes
        from machine where id = any(%s) order by id for update) as machines"""
_NEWEST = """
    select a.workload, a.attempt, a.rank, a.released_at is not null or a.evicting_since is not null
    from attempt as a join workload as w on w.id = a.workload and w.attempt = a.attempt where w.id = any(%s)"""
_ENEMIES = "select victim, evictor from eviction where victim = any(%s)"
_HOLDINGS = """
    select l.workload, l.machine, l.slots, l.cpus_milli - l.awaited_cpus_milli, l.memory_bytes - l.awaited_memory_bytes
    from allocation as l join workload as w on w.id = l.workload and w.attempt = l.attempt
    where w.id = any(%s) and l.machine = any(%s) and l.released_at is null"""


_WRITE = f"""
    with given as (select %s::json as rows),
    workloads as (
        update workload
        set attempt = n.attempt, region = n.region, phase = '{Phase.PLACING.value}', reason = n.reason::jsonb
        from unnest(%s::text[], %s::bigint[], %s::text[], %s::text[]) as n (id, attempt, region, reason)
        where workload.id = n.id),
    attempts as (
        insert into attempt (workload, attempt, region, plan, awarded_at, ready_at, gpu_types, cpus_milli, rank)
        select workload, attempt, region, plan, clock_timestamp(), case when ready then clock_timestamp() end,
               gpu_types, cpus_milli, rank
        from given, json_to_recordset(rows -> 'attempts')
            as n (workload text, attempt bigint, region text, plan jsonb, ready bool, gpu_types jsonb,
                  cpus_milli bigint, rank bigint)),
    allocations as (
        insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli,
                                memory_bytes, awaited_memory_bytes, tasks, held_at)
        select workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
               awaited_memory_bytes, tasks, case when complete then clock_timestamp() end
        from given, json_to_recordset(rows -> 'allocations')
            as n (workload text, attempt bigint, machine text, slots bigint, awaited bigint, cpus_milli bigint,
                  complete bool, awaited_cpus_milli bigint, memory_bytes bigint, awaited_memory_bytes bigint,
                  tasks jsonb)),
    events as (
        insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)
        select 'workload.{Phase.PLACING.value}', tenant, workload, attempt, region, reason, detail, dedup
        from given, json_to_recordset(rows -> 'events')
            as n (tenant text, workload text, attempt bigint, region text, reason jsonb, detail jsonb, dedup text)),
    mails as (
        insert into outbox (kind, workload, body)
        select 'mail', workload, body
        from given, json_to_recordset(rows -> 'mails') as n (workload text, body jsonb)),
    waits as (delete from waiting where workload = any(%s))
    select pg_notify('{events.CHANNEL}', ''), pg_notify('{outbox.CHANNEL}', '')"""
_VICTIM = "json_to_recordset(%s::json) as n (evictor text, evictor_attempt bigint, victim text, victim_attempt bigint)"
_EVICTIONS = f"insert into eviction (evictor, evictor_attempt, victim, victim_attempt) select * from {_VICTIM}"
_LOCK_VICTIMS = f"""
    select from attempt as a join {_VICTIM} on a.workload = n.victim and a.attempt = n.victim_attempt
    order by a.workload for update of a"""
_VICTIMS = f"""
    update attempt set evicting_since = clock_timestamp(), evictor = n.evictor
    from {_VICTIM} where attempt.workload = n.victim and attempt.attempt = n.victim_attempt"""


def _write(connection: Connection[Any], writes: _Writes) -> None:
    """Writes everything, in one statement and what evictions need."""
    # Arrays for what is looked up by a key: of a document's length the planner knows nothing.
    own = [[row[name] for row in writes.attempts] for name in ("workload", "attempt", "region")]
    reasons = [json.dumps(row["reason"]) for row in writes.events]
    connection.execute(_WRITE.encode(), [json.dumps(vars(writes)), *own, reasons, own[0]])
    if writes.evictions:
        victims = [json.dumps(writes.evictions)]
        for query in (_EVICTIONS, _LOCK_VICTIMS, _VICTIMS):
            connection.execute(query.encode(), victims)
