"""Facts from a provider's list about the machines of the ledger: waits, starts, ends that are known in advance."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from activities.capacity.ledger import request_end
from activities.lifecycle.machines import give_notice
from capacity.provider import FoundMachine, Provider
from domain.lifecycle.instances import InstancePhase
from domain.reasons import Reason, ReasonCode, in_words
from domain.task_reports import NoticeReport
from infra.config.scheduling import CapacitySettings
from infra.db import events, outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Machine
from infra.db.session import transaction

_STEP = timedelta(seconds=30)
"""An expected start that changes by less is not written again: it would say nothing new."""
_SKEW_S = 2.0
"""A notice whose end is later by at most this stays: the clocks of agents and providers differ."""


def observe(engine: Engine, settings: CapacitySettings, provider: Provider, found: Sequence[FoundMachine]) -> None:
    """Writes into the ledger what a provider's list says about its live instances, and acts on announced ends.

    - A machine that waits at the provider has the reason `pending_at_provider`, with the expected start.
    - From the start of a machine on, the time until its agent registers is limited (`capacity.join_s`).
    - A machine gets no new work from `no_work_s` before its end on, and its tasks get notice `leave_s` before it; at
      once, if the end is not that of its allocation.
    - A machine is drained if its provider announces that it takes the machine back.
    """
    by_id = {machine.native_id: machine for machine in found if machine.ended is None}
    live = select(InstanceRow.id, InstanceRow.native_id).where(
        InstanceRow.provider == provider.name,
        InstanceRow.gone_at.is_(None),
        InstanceRow.lost_at.is_(None),
        InstanceRow.native_id.in_(by_id),
    )
    with transaction(engine) as session:
        rows = [
            (instance, by_id[str(native_id)]) for instance, native_id in session.execute(live.order_by(InstanceRow.id))
        ]
    for instance, machine in rows:
        with transaction(engine) as session:
            row = session.get(InstanceRow, instance, with_for_update=True)
            if row is not None and row.gone_at is None:
                _observe(session, settings, provider, row, machine)


def _observe(
    session: Session, settings: CapacitySettings, provider: Provider, row: InstanceRow, machine: FoundMachine
) -> None:
    if machine.waits is not None and row.started_at is None:
        _waits(row, machine, machine.waits)
    elif machine.waits is None and row.started_at is None:
        row.started_at, row.reason = func.now(), Reason(ReasonCode.AWAITING_AGENT, {"provider": row.provider}).to_json()
        outbox.instance(session, row.id)
    ends_at = None if machine.ends_at_s is None else datetime.fromtimestamp(machine.ends_at_s, UTC)
    if row.ends_at != ends_at:
        row.ends_at = ends_at
    if machine.leaves is not None:
        detail = {"provider": provider.name, "words": machine.leaves}
        request_end(session, row.id, Reason(ReasonCode.LEFT_AT_PROVIDER, detail))
    if row.machine is not None:
        _near_end(session, settings, row.machine, provider.name, machine)


def _waits(row: InstanceRow, machine: FoundMachine, words: str) -> None:
    """Records why a machine waits at its provider, and when it is expected to start."""
    detail = {"provider": row.provider, "words": words}
    starts_at = None if machine.starts_at_s is None else datetime.fromtimestamp(machine.starts_at_s, UTC)
    moved = starts_at is not None and (row.expected_at is None or abs(starts_at - row.expected_at) >= _STEP)
    if starts_at is None or moved:
        row.expected_at = starts_at
    if row.expected_at is not None:
        detail["starts_at"] = in_words(row.expected_at.timestamp())
    reason = Reason(ReasonCode.PENDING_AT_PROVIDER, detail).to_json()
    if row.phase == InstancePhase.JOINING and row.reason != reason:
        row.reason = reason


def _near_end(session: Session, settings: CapacitySettings, machine: str, provider: str, found: FoundMachine) -> None:
    """Cordons a machine that its provider ends soon, then gives its tasks notice; uncordons it if the end is withdrawn.

    If the machine already has a notice, for example from its agent, only an earlier end gives another notice.
    """
    row = session.get(Machine, machine, with_for_update=True)
    if row is None or row.state == "lost":
        return
    ends_at_s = found.ends_at_s
    left_s = float("inf") if ends_at_s is None else ends_at_s - time.time()
    if row.notice is not None:
        said_s = row.notice["detail"].get("ends_at_s")
        if ends_at_s is None or (said_s is not None and said_s <= ends_at_s + _SKEW_S):
            return
    because = found.leaves or found.ends_because
    if ends_at_s is not None and (left_s <= settings.leave_s or found.ends_because is not None):
        kind, words = ("walltime", "the end of its allocation") if because is None else ("preempt", because)
        notice = NoticeReport(provider, kind, True, time.time(), ends_at_s, words)
        give_notice(session, row, Reason(ReasonCode.PLATFORM_NOTICE, {"machine": row.id, **notice.numbers()}))
    elif row.notice is not None:
        return
    elif ends_at_s is not None and left_s <= settings.no_work_s:
        if row.cordon is None:
            reason = Reason(ReasonCode.ENDS_SOON, {"provider": provider, "ends_at": in_words(ends_at_s)})
            row.cordon = reason.to_json()
            events.record(session, "machine.cordoned", region=row.region, machine=row.id, reason=reason)
    elif row.cordon is not None and row.cordon.get("code") == ReasonCode.ENDS_SOON:
        row.cordon = None
        outbox.wake_scheduler(session)
