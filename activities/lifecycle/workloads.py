"""Activities on a workload's row: phase changes and the release of an attempt."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, bindparam, func, select, text, tuple_
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.lifecycle import handover, leases, lent_work
from activities.lifecycle.attempt_reports import set_progress
from activities.scheduling.awards import AWARD
from activities.scheduling.repairs import NextPlace, place_left, place_repaired
from domain import ids
from domain.phases import TERMINAL_PHASES, Phase
from domain.protocol.activities import Activity
from domain.protocol.workloads import TASKS_MAY_RUN, FlushedRequest, ReleaseRequest, TransitionRequest
from domain.reasons import Reason, ReasonCode, running_since
from domain.task_reports import FEW_BYTES
from infra.config.settings import Settings
from infra.db import events, outbox
from infra.db.lost_work import lost_by
from infra.db.models import Attempt, Machine, Workload
from infra.db.phases import IllegalTransition, enter_phases
from infra.db.session import transaction
from infra.db.usage import record_attempts

_LOCK = text(
    "select id, attempt, region, finished_at is not null as finished, clock_timestamp() as now"
    " from workload where id = any(:workloads) order by id for update"
)
# With the arrays of elements that have a booking: the award of an element locks its array.
_LOCK_LEAVING = text(
    "select id from workload where id = any(cast(:workloads as text[]) || array(select w.array_id from booking as b"
    " join workload as w on w.id = b.workload where b.workload = any(:workloads))) order by id for update"
)
_CHECKPOINTS_HERE = text(
    "update workload as w set checkpoint_region = w.region, checkpoint_store = a.store_url from attempt as a"
    " where w.id = any(:workloads) and a.workload = w.id and a.attempt = w.attempt"
)
_BEGAN = text(
    "update attempt set started_at = :now, launch_s = coalesce(:launch_s, launch_s)"
    " where workload = :workload and attempt = :attempt"
)
_LIVE = text(
    "select a.workload, a.started_at is not null or w.phase = any(:after_asking)"
    " or a.ready_at is not null and (select count(*) = 1 from allocation where (workload, attempt) = (w.id, a.attempt))"
    " as may_run from attempt as a join workload as w on w.id = a.workload"
    " where (a.workload, a.attempt) in (select * from unnest(cast(:workloads as text[]), cast(:attempts as bigint[])))"
    " and a.released_at is null order by a.workload"
)
_ATTEMPTS = (
    select(Attempt)
    .where(tuple_(Attempt.workload, Attempt.attempt).in_(bindparam("runs", expanding=True)))
    .order_by(Attempt.workload)
    .with_for_update()
)
_AWARD = text(AWARD.format(":candidates"))
_AFTER_ASKING = [p.value for p in (Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING)]
"""Phases that are written before the requests to prepare or start tasks are sent to machines. With one machine, the
start request may be sent concurrently with that write (`LaunchPlan.starts_at_once`)."""


def locked(session: Session, workload_id: str) -> Workload:
    """Locks and returns the workload's row.

    Raises:
        ApplicationError: the workload does not exist; not retried.
    """
    row = session.get(Workload, workload_id, with_for_update=True)
    if row is None:
        raise _unknown(workload_id)
    return row


def _unknown(workload: str) -> ApplicationError:
    return ApplicationError(f"workload {workload} does not exist", type="UnknownWorkload", non_retryable=True)


def _enter(
    session: Session,
    phase: Phase,
    moves: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    leaves: bool = False,
) -> set[str]:
    """Calls `enter_phases`. An illegal transition becomes an error that is not retried."""
    try:
        return enter_phases(session, phase, moves, leaves=leaves)
    except IllegalTransition as error:
        raise ApplicationError(str(error), type="IllegalTransition", non_retryable=True) from None


def record_checkpoint(session: Session, row: Workload, attempt: Attempt) -> None:
    """Writes the event of an attempt's newest checkpoint."""
    events.record(
        session,
        "workload.checkpoint",
        tenant=row.tenant,
        workload=row.id,
        attempt=attempt.attempt,
        region=attempt.region,
        detail={"step": attempt.checkpoint_step, "bytes": attempt.checkpoint_bytes, "took_s": attempt.checkpoint_s},
        dedup=f"{attempt.attempt}:checkpoint:{attempt.checkpoint_step}",
    )


def _tell_unstored(session: Session, attempt: Attempt) -> None:
    """Writes an event if outputs of an attempt are not stored."""
    if not attempt.unstored:
        return
    _record(session, attempt, "outputs_not_stored", {"outputs": len(attempt.unstored), **attempt.unstored[0]})


def _warn_of_left_files(session: Session, attempt: Attempt, phase: Phase) -> None:
    """Writes an event if a workload ends and its tasks have left more than `FEW_BYTES`, which will be deleted."""
    left = attempt.left_files or []
    size = sum(int(one["bytes"]) for one in left)
    if phase not in TERMINAL_PHASES or size <= FEW_BYTES:
        return
    first = left[0]
    detail = {"bytes": size, "machine": first["machine"], "path": first["path"], "until_s": first["until_s"]}
    _record(session, attempt, "left_files", detail)


def _record(session: Session, attempt: Attempt, what: str, detail: dict[str, Any]) -> None:
    """Writes an event about an attempt, once."""
    events.record(
        session,
        f"workload.{what}",
        tenant=session.get_one(Workload, attempt.workload).tenant,
        workload=attempt.workload,
        attempt=attempt.attempt,
        region=attempt.region,
        detail=detail,
        dedup=f"{attempt.attempt}:{what}",
    )


def _set_lost_work(session: Session, attempt: Attempt) -> None:
    """Writes the lost work of a released attempt, unless the workload has completed."""
    session.flush()
    session.refresh(attempt, ["released_at", "started_at"])
    if attempt.released_at is None or (attempt.outcome or {}).get("code") == ReasonCode.COMPLETED:
        return
    attempt.lost_s = lost_by(attempt, attempt.released_at.timestamp())


def move(session: Session, requests: Sequence[TransitionRequest]) -> bool:
    """Changes the phases of workloads to the same phase; returns False if a newer attempt of one has been awarded.

    Raises:
        ApplicationError: a workload does not exist, or the phase cannot follow its phase; not retried.
    """
    asked = {request.workload_id: request for request in requests}
    phase = Phase(requests[0].phase)
    found = {row.id: row for row in session.execute(_LOCK, {"workloads": list(asked)})}
    for workload in asked.keys() - found.keys():
        raise _unknown(workload)
    current = {one: row for one, row in found.items() if row.attempt == asked[one].attempt}
    live = {one: row for one, row in current.items() if not row.finished}  # See `infra.db.queued_end`.
    starting = {one: reason for one in live if (reason := asked[one].provisioning) is not None}
    if starting:
        _enter(session, Phase.PROVISIONING, {one: (reason, {}) for one, reason in starting.items()})
        session.execute(_CHECKPOINTS_HERE, {"workloads": list(starting)})
    reasons = {
        one: running_since(row.attempt, row.region, row.now).to_json() if phase is Phase.RUNNING else asked[one].reason
        for one, row in live.items()
    }
    moved = _enter(session, phase, {one: (reason, {}) for one, reason in reasons.items()}) if live else set()
    if phase is Phase.RUNNING and moved:
        session.execute(
            _BEGAN,
            [
                {"workload": one, "attempt": live[one].attempt, "now": live[one].now, "launch_s": asked[one].launch_s}
                for one in sorted(moved)
            ],
        )
    if phase in TERMINAL_PHASES and live:
        outbox.wake_scheduler(session)
    return len(current) == len(asked)


class WorkloadActivities:
    """The activities on workloads and their attempts."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.TRANSITION.value)
    def transition(self, request: TransitionRequest) -> bool:
        """Changes the phase; returns False if a newer attempt has been awarded."""
        with transaction(self._engine) as session:
            return move(session, [request])

    @activity.defn(name=Activity.RELEASE.value)
    def release(self, request: ReleaseRequest) -> None:
        """Ends an attempt and hands over its slots.

        Raises:
            ApplicationError: `TASKS_MAY_RUN` (not retried): the workflow has started no tasks, but some may run.
        """
        self.release_all([request])

    def release_all(self, requests: Sequence[ReleaseRequest]) -> None:
        """Ends attempts of different workloads, which enter the same phase, in one transaction.

        Raises:
            ApplicationError: as `release`, for any of them; none is released.
        """
        phase = Phase(requests[0].next_phase)
        asked = {request.workload_id: request for request in requests}
        with transaction(self._engine) as session:
            nexts = self._next_places(session, requests, phase)
            live, locked = self._lock_live(session, asked, nexts)
            if not live:
                return
            for one in live:
                if ids.is_runner(one.workload_id):
                    reason = Reason.from_json(one.reason)
                    leases.return_elements(session, one.workload_id, one.attempt, one.elements, phase, reason)
            now, machines = handover.release(session, live, {m for one in nexts.values() for m in one.machines})
            # The attempts are locked after the machines: see the order of locks in `handover`.
            runs = {one.workload_id: one.attempt for one in live}
            attempts = session.scalars(_ATTEMPTS, {"runs": list(runs.items())}).all()
            moves = {}
            for attempt in attempts:
                one = asked[attempt.workload]
                set_progress(attempt, one.progress)
                lent_work.earn(session, attempt, one.progress)
                attempt.released_at, attempt.outcome = now, one.reason
                moves[attempt.workload] = (
                    one.reason,
                    {
                        "machines": list(machines[attempt.workload]),
                        "last_step": attempt.last_step,
                        "checkpoint_step": attempt.checkpoint_step,
                        "resumed_step": attempt.resumed_step,
                    },
                )
            session.flush()
            _enter(session, phase, moves, leaves=True)
            record_attempts(session, runs)
            for attempt in attempts:
                _warn_of_left_files(session, attempt, phase)
                _tell_unstored(session, attempt)
                if (attempt.outcome or {}).get("code") != ReasonCode.COMPLETED:
                    _set_lost_work(session, attempt)
                blamed = asked[attempt.workload].blames_machine
                self._judge_machines(session, attempt, machines[attempt.workload], blamed, phase)
            _go_on_where_booked(session, attempts, locked)
            for place in (nexts[one.workload_id] for one in live if one.workload_id in nexts):
                session.execute(_AWARD, {"candidates": json.dumps([place.award])})
            outbox.wake_scheduler(session)

    def _next_places(self, session: Session, requests: Sequence[ReleaseRequest], phase: Phase) -> dict[str, NextPlace]:
        """Returns the places where workloads continue without a wait in the queue."""
        scheduler, out = self._settings.scheduler, dict[str, NextPlace]()
        for one in requests:
            code, place = one.reason.get("code"), None
            if scheduler.repair and phase is Phase.PENDING and code == ReasonCode.MACHINE_LOST and not one.unstarted:
                lost = {*one.silent_machines, str(one.reason["detail"]["machine"])}
                place = place_repaired(session, one.workload_id, one.attempt, lost, scheduler.min_runtime_s)
            if scheduler.shrink and phase is Phase.PREEMPTED and code == ReasonCode.EVICTED:
                place = place_left(session, one.workload_id, one.attempt, one.silent_machines)
            if place is not None:
                out[one.workload_id] = place
        return out

    @staticmethod
    def _lock_live(
        session: Session, asked: Mapping[str, ReleaseRequest], nexts: Mapping[str, NextPlace]
    ) -> tuple[list[ReleaseRequest], Collection[str]]:
        """Locks the workloads, the heads of the arrays of runners and of elements with bookings, and what their next
        places need.

        Returns the requests for live attempts, by id, and the ids of the locked workloads.
        """
        heads = {ids.array_of(one) for one in asked if ids.is_runner(one)}
        wanted = heads.union(asked, *(one.workloads for one in nexts.values()))
        found = set(session.scalars(_LOCK_LEAVING, {"workloads": sorted(wanted)}))
        for workload in asked.keys() - found:
            raise _unknown(workload)
        runs = {"workloads": list(asked), "attempts": [one.attempt for one in asked.values()]}
        live = []
        for row in session.execute(_LIVE, runs | {"after_asking": _AFTER_ASKING}):
            one = asked[row.workload]
            if one.unstarted and row.may_run:
                message = f"tasks of attempt {one.attempt} of {one.workload_id} may run: stop them first"
                raise ApplicationError(message, type=TASKS_MAY_RUN, non_retryable=True)
            live.append(one)
        return live, found

    @activity.defn(name=Activity.FLUSHED.value)
    def flushed(self, request: FlushedRequest) -> None:
        """Writes the last reports of the tasks of an attempt that was released while they saved."""
        with transaction(self._engine) as session:
            row = locked(session, request.workload_id)
            attempt = session.get(Attempt, (request.workload_id, request.attempt), with_for_update=True)
            if attempt is None or attempt.released_at is None:
                return
            before = attempt.checkpoint_step
            set_progress(attempt, request.progress)
            lent_work.earn(session, attempt, request.progress)
            _set_lost_work(session, attempt)
            if attempt.checkpoint_step != before:
                record_checkpoint(session, row, attempt)

    def _judge_machines(
        self, session: Session, attempt: Attempt, machines: Mapping[str, Machine], blamed: str | None, phase: Phase
    ) -> None:
        """Counts consecutive workloads that failed on a locked machine, and cordons the machine at the limit.

        A workload counts once per machine, even if it fails there several times. A workload that contributed to a
        cordon does not count on other machines: if it fails everywhere, the workload is more likely at fault.
        Workloads that were on the machine at the same time count as one, because all of them lose a machine that stops
        answering.
        """
        if phase is Phase.SUCCEEDED:
            for machine in machines.values():
                machine.failed_gangs, machine.failed_workloads, machine.failed_at = 0, [], None
                if machine.answered_at is None:
                    machine.answered_at = func.now()
        guilty, workload = machines.get(blamed or ""), attempt.workload
        if guilty is None or workload in guilty.failed_workloads or _has_cordoned(session, workload):
            return
        if guilty.failed_at is not None and guilty.failed_at > attempt.awarded_at:
            return
        guilty.failed_at = func.clock_timestamp()
        guilty.failed_workloads = [*guilty.failed_workloads, workload]
        guilty.failed_gangs = len(guilty.failed_workloads)
        if guilty.failed_gangs >= self._settings.lifecycle.cordon_after_failed_gangs and guilty.cordon is None:
            reason = Reason(ReasonCode.KEEPS_FAILING_GANGS, {"failures": guilty.failed_gangs, "workload": workload})
            guilty.cordon = reason.to_json()
            events.record(session, "machine.cordoned", region=guilty.region, machine=guilty.id, reason=reason)


def _go_on_where_booked(session: Session, released: Sequence[Attempt], locked: Collection[str]) -> None:
    """Ends the bookings of released attempts, and awards those for whose reason the attempts ended.

    A workload whose award fails stays in the queue: a machine is lost or cordoned, for example, or it is on hold. So
    does an element whose array is not among the `locked` workloads, because it was booked while the release waited for
    locks: a lock of the array would now be out of order.
    """
    session.flush()
    codes = {attempt.workload: (attempt.outcome or {}).get("code") for attempt in released}
    for booking in handover.end_bookings(session, codes):
        array = session.get_one(Workload, booking.workload).array_id
        if codes[booking.workload] == booking.code and (array is None or array in locked):
            session.execute(_AWARD, {"candidates": json.dumps([booking.candidate])})


def _has_cordoned(session: Session, workload: str) -> bool:
    """Returns whether a machine is cordoned to which a failure of this workload contributed."""
    found = select(Machine.id).where(
        Machine.cordon["code"].astext == ReasonCode.KEEPS_FAILING_GANGS.value,
        Machine.failed_workloads.contains([workload]),
    )
    return session.execute(found.limit(1)).first() is not None
