"""Leases of the elements of an array that runners run, and their ends.

A runner's attempt leases waiting elements, a chunk at a time, and finishes those of its last chunk in the same
transaction. The row of an element names the runner and the attempt that have leased it: another attempt can neither
finish nor return it. The release of the attempt returns what it has not finished. All transactions lock the head of the
array first, then the runner.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, Row, text
from sqlalchemy.orm import Session
from temporalio import activity

from activities.lifecycle.workload_start import read_start
from domain.array_elements import indexes_at
from domain.ids import array_of, is_runner
from domain.lifecycle.endings import EndedAttempt, FailureCounts, judge
from domain.lifecycle.gangs import GangEnd, TaskFailure
from domain.lifecycle.retry_limits import limit_reached
from domain.phases import TERMINAL_PHASES, Phase
from domain.protocol.activities import Activity
from domain.protocol.leases import ElementResult, LeasedElement, LeaseRequest
from domain.protocol.machines import TaskExit
from domain.protocol.workloads import LaunchPlan
from domain.reasons import Reason, ReasonCode, running_since
from domain.spec import WorkloadSpec
from infra.db import outbox
from infra.db.session import transaction

FIRST, MOST = 4, 1000
"""The elements of a runner's first chunk, and the most of a chunk."""
_CHUNK_S, _LONGEST_S, _LEAST_S = 2.0, 20.0, 0.25
"""How long the elements of a chunk should take, at most, and at least, however few elements are left."""
_WAYS = 3
"""They take at least so many times as long as the rest of the chunk."""
_GROWTH = 16
_HEAD = text(
    "select held_by is not null as held, finished_at is not null as ended from workload where id = :id for update"
)
_RUNNER = text(
    "select w.region, clock_timestamp() as now from workload as w"
    " join attempt as a on (a.workload, a.attempt) = (w.id, w.attempt)"
    " where w.id = :runner and w.attempt = :attempt and a.released_at is null for update of w"
)
_ARRAY = text(
    "select a.ranges, a.cancelled, multirange_size(a.waiting - array_blocked(a.id)) as waiting,"
    " (select count(*) from workload where array_id = a.id and runner = '' and finished_at is null"
    " and held_by is null) as returned, greatest(array_placed(a.id), 1) as runners"
    " from workload_array as a where id = :id"
)
_OWN = text(
    "select id, array_index, attempt, phase, reason from workload where array_id = :id and finished_at is null"
    " and runner = :runner and runner_attempt = :attempt order by submitted_at"
)
_NEXT = text(
    "select p from workload_array as a, unnest(a.waiting - array_blocked(a.id)) as r cross join lateral"
    " generate_series(lower(r), least(upper(r)::bigint - 1, lower(r) + :most)) as p where a.id = :id"
    " order by p limit :most"
)
_TAKE = text("select take_elements(:id, cast(:positions as bigint[]), cast(:indexes as bigint[]))")
_LEASE = text(
    "update workload as w set runner = :runner, runner_attempt = :attempt, phase = 'running', region = :region,"
    " attempt = w.attempt + 1, reason = jsonb_set(cast(:reason as jsonb), '{detail,attempt}', to_jsonb(w.attempt + 1))"
    " from (select id from workload where array_id = :id and finished_at is null and runner = '' and held_by is null"
    " order by submitted_at limit :most) as next where w.id = next.id returning w.array_index, w.attempt"
)
# An attempt that ran has a row from its end on, with the place of the runner's attempt. It holds nothing: the runner's
# attempt does.
_END = text(
    "with ending as (select * from jsonb_to_recordset(cast(:ends as jsonb)) as e (id text, phase text, ends boolean,"
    " reason jsonb, began timestamptz, ended timestamptz)"
    "), changed as ("
    " update workload as w set phase = e.phase, reason = e.reason, runner = case when e.ends then w.runner else '' end,"
    " finished_at = case when e.ends then now() end, region = case when e.ends then w.region end"
    " from ending as e where w.id = e.id"
    " returning w.id, w.tenant, w.attempt, e.phase, e.reason, e.began, e.ended"
    "), tried as ("
    " insert into attempt (workload, attempt, region, plan, awarded_at, ready_at, started_at, released_at, gpu_types,"
    " cpus_milli, rank, outcome)"
    " select c.id, c.attempt, :region, jsonb_build_object('jobs', a.plan -> 'jobs'), began, began, began, ended, '{}',"
    " 0, 0, c.reason from changed as c, attempt as a"
    " where began is not null and (a.workload, a.attempt) = (:runner, :attempt)"
    ") insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)"
    " select 'workload.' || phase, tenant, id, attempt, :region, reason, '{}', attempt || ':' || phase from changed"
)
_CHANGED = text("insert into change (kind, key) values ('workload', :id)")
_LAST = text(
    "insert into outbox (kind, body) select 'array', jsonb_build_object('array', id) from workload_array"
    " where id = :id and isempty(waiting)"
)


@dataclass(frozen=True)
class _Lease:
    """A lease of the runner's attempt, which its transaction has locked."""

    array: str
    runner: str
    attempt: int
    region: str
    now: datetime

    @property
    def keys(self) -> dict[str, Any]:
        """The parameters of the statements."""
        return {"id": self.array, "runner": self.runner, "attempt": self.attempt}


class LeaseActivities:
    """The activity of the workflows of runners."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @activity.defn(name=Activity.LEASE_ELEMENTS.value)
    def lease(self, request: LeaseRequest) -> list[LeasedElement]:
        """Finishes the elements of the last chunk, and leases the next; none: the runner is to end."""
        with transaction(self._engine) as session:
            head = lock_array(session, request.workload_id)
            lease = _locked(session, request.workload_id, request.attempt)
            if lease is None:
                return []
            finish(session, lease, request.results)
            left = session.execute(_OWN, lease.keys).all()
            if left or request.ends or head is None or head.held or head.ended:
                return [LeasedElement(row.array_index, row.attempt) for row in left]
            return _take(session, lease, _size(session, lease, request))


def lock_array(session: Session, workload: str) -> Row[Any] | None:
    """Locks the head of a runner's array, if the workload is a runner; returns None if it is none."""
    return session.execute(_HEAD, {"id": array_of(workload)}).first() if is_runner(workload) else None


def return_elements(
    session: Session, workload: str, attempt: int, results: Sequence[ElementResult], phase: Phase, reason: Reason
) -> None:
    """Ends a runner's leases while its attempt is released: elements with a result end, the others wait again.

    The head of the array is locked (`lock_array`).

    Args:
        session: the session of the transaction.
        workload: the runner.
        attempt: its attempt, which is not released yet.
        results: what is known of the elements that it has leased.
        phase: the phase that the runner enters. If it fails, each of its elements has failed for its reason.
        reason: why the attempt ends.
    """
    lease = _locked(session, workload, attempt)
    if lease is None:
        return
    known = {(one.index, one.attempt): one for one in results}
    if phase is Phase.FAILED and not known and not session.execute(_OWN, lease.keys).first():
        _take(session, lease, 1)  # Without this, runners that cannot start would follow each other for ever.
    finish(session, lease, results)
    cancelled = session.execute(_ARRAY, {"id": lease.array}).one().cancelled
    once = _at_most_once(session, lease)
    ends = []
    for row in session.execute(_OWN, lease.keys).all():
        result = known.get((row.array_index, row.attempt))
        began = lease.now if result is None or result.began_s is not None else None
        if cancelled or row.phase == Phase.CHECKPOINTING:
            by = row.reason if row.phase == Phase.CHECKPOINTING else _CANCELLED.to_json()
            ends.append(_end(row.id, Phase.CANCELLED, by, began, lease.now))
        elif phase is Phase.FAILED and reason.code is not ReasonCode.CANCELLED_BY_USER:
            ends.append(_end(row.id, Phase.FAILED, reason.to_json(), lease.now, lease.now))
        elif once and began is not None:
            detail = {"runner": lease.runner, "words": reason.sentence}
            ends.append(_end(row.id, Phase.FAILED, Reason(ReasonCode.AT_MOST_ONCE, detail).to_json(), began, lease.now))
        else:
            start = read_start(session, row.id) if began is not None else None
            final = None if start is None else limit_reached(reason, start.state)
            again = Phase.PREEMPTED if phase is Phase.PREEMPTED else Phase.PENDING
            why = (final or reason).to_json()
            ends.append(_end(row.id, again if final is None else Phase.FAILED, why, began, lease.now))
    _write(session, lease, ends)


def finish(session: Session, lease: _Lease, results: Sequence[ElementResult]) -> None:
    """Applies results to leased elements: each ends, or waits again if it failed and has retries left."""
    final = {one.index: one for one in results if one.is_final}
    stopped = {one.index: one for one in results if one.noticed}
    if not final and not stopped:
        return
    spec: WorkloadSpec | None = None
    ends = []
    for row in session.execute(_OWN, lease.keys).all():
        result = final.get(row.array_index) or stopped.get(row.array_index)
        if result is None or result.attempt != row.attempt:
            continue
        began = None if result.began_s is None else _time(result.began_s, lease.now)
        ended = _time(result.ended_s, lease.now)
        if row.phase == Phase.CHECKPOINTING:
            ends.append(_end(row.id, Phase.CANCELLED, row.reason, began, ended))
        elif result.noticed:
            continue
        else:
            spec = spec or _spec(session, lease.array)
            phase, reason = _judge(session, spec, row, result)
            ends.append(_end(row.id, phase, reason.to_json(), began, ended))
    _write(session, lease, ends)


_CANCELLED = Reason(ReasonCode.CANCELLED_BY_USER, {"by": "its array"})


def _judge(session: Session, spec: WorkloadSpec, row: Row[Any], result: ElementResult) -> tuple[Phase, Reason]:
    """Returns what follows from the end of an element that was not stopped, by the rules of workloads."""
    limits, job = spec.limits, spec.jobs[0].name
    own = TaskExit(job, 0, result.exit_code, result.signal)
    memory = None
    if result.memory_limit_bytes is not None:
        memory = {"memory_limit_bytes": result.memory_limit_bytes, "memory_peak_bytes": result.memory_peak_bytes or 0}
    good = own.succeeded and not result.timed_out
    counts = FailureCounts()
    if not good and (start := read_start(session, row.id)) is not None:
        counts = FailureCounts(failures=start.state.failures, by_exit=start.state.by_exit)
    plan = LaunchPlan(
        region="", bucket_url="", launch_key="", nodes=[], tasks=1, checkpoint_region=None, grace_s=0.0,
        max_runtime_s=limits.max_runtime_s, retries=limits.retries, retries_by_exit=limits.retries_by_exit,
        heartbeat_timeout_s=0.0, node_lost_after_s=0.0,
    )  # fmt: skip
    ran_s = (result.ended_s or 0.0) - (result.began_s or 0.0)
    failure = TaskFailure(f"{job}/0", own.status, memory)
    end = GangEnd(all_succeeded=good, lost_machine=None, first_failure=failure, failed=not good)
    case = EndedAttempt(end, plan, counts, row.id, row.attempt, ran_s, None, result.timed_out)
    ending, _ = judge(case)
    return ending.phase, ending.reason


def _end(
    element: str, phase: Phase, reason: Mapping[str, Any] | None, began: datetime | None, ended: datetime
) -> dict[str, Any]:
    at = None if began is None else began.isoformat()
    ends = phase in TERMINAL_PHASES
    return {
        "id": element, "phase": phase.value, "ends": ends, "reason": reason, "began": at, "ended": ended.isoformat()
    }  # fmt: skip


def _write(session: Session, lease: _Lease, ends: Collection[dict[str, Any]]) -> None:
    if not ends:
        return
    session.execute(_END, lease.keys | {"ends": json.dumps(list(ends)), "region": lease.region})
    session.execute(_LAST, {"id": lease.array})
    if any(not end["ends"] for end in ends):
        session.execute(_CHANGED, {"id": lease.array})
        outbox.wake_scheduler(session)
    outbox.wake_readers(session)


def _take(session: Session, lease: _Lease, most: int) -> list[LeasedElement]:
    """Leases at most `most` elements, first those that were leased before; returns them sorted by index."""
    array = session.execute(_ARRAY, {"id": lease.array}).one()
    if fresh := most - min(array.returned, most):
        positions = list(session.scalars(_NEXT, {"id": lease.array, "most": fresh}))
        if positions:
            indexes = list(indexes_at(array.ranges, positions))
            session.execute(_TAKE, {"id": lease.array, "positions": positions, "indexes": indexes})
    if array.returned:
        session.execute(_CHANGED, {"id": lease.array})
    reason = json.dumps(running_since(0, lease.region, lease.now).to_json())
    found = session.execute(_LEASE, lease.keys | {"most": most, "region": lease.region, "reason": reason})
    return [LeasedElement(index, attempt) for index, attempt in sorted(found)]


def _size(session: Session, lease: _Lease, request: LeaseRequest) -> int:
    """Returns the number of elements in the next chunk.

    A chunk should run for some seconds. Near the end of the array, chunks get smaller, so that all runners finish at
    about the same time.
    """
    array = session.execute(_ARRAY, {"id": lease.array}).one()
    waiting = array.waiting + array.returned
    if not waiting or array.cancelled:
        return 0
    if _at_most_once(session, lease):
        return 1  # A lost machine then makes one element fail that may have been started, and no others.
    if not (times := [(one.began_s, one.ended_s) for one in request.results if one.began_s and one.ended_s]):
        return min(FIRST, -(-int(waiting) // int(array.runners)))
    busy_s = max(max(ended for _, ended in times) - min(began for began, _ in times), 1e-4 * len(times))
    # The round trip to the agent takes longer on a loaded computer. A chunk must run for several round trips.
    chunk_s = min(max(_CHUNK_S, _WAYS * (request.took_s - busy_s)), _LONGEST_S)
    mean_s = busy_s / len(times)
    share = max(waiting / (2 * array.runners), _LEAST_S / mean_s)
    wanted: float = min(share, chunk_s / mean_s, _GROWTH * len(times), MOST)
    return max(1, int(wanted))


def _locked(session: Session, runner: str, attempt: int) -> _Lease | None:
    """Locks the row of a runner, whose array is locked; returns None if another attempt has replaced this one."""
    found = session.execute(_RUNNER, {"runner": runner, "attempt": attempt}).first()
    return None if found is None else _Lease(array_of(runner), runner, attempt, found.region, found.now)


def _spec(session: Session, array: str) -> WorkloadSpec:
    return WorkloadSpec.model_validate(
        session.execute(text("select spec from workload where id = :id"), {"id": array}).scalar_one()
    )


def _at_most_once(session: Session, lease: _Lease) -> bool:
    asked = text("select spec #>> '{array,runners,at_most_once}' = 'true' from workload where id = :id")
    return bool(session.execute(asked, {"id": lease.array}).scalar_one_or_none())


def _time(at_s: float | None, now: datetime) -> datetime:
    """Returns a time by a machine's clock, which is not trusted, as a time that is possible."""
    if at_s is None or not 0 <= at_s <= now.timestamp():
        return now
    return datetime.fromtimestamp(at_s, UTC)
