"""Changes a workload's phase in one statement: updates the row, writes the event and notifies readers."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.lifecycle.attempts import NEXT_PHASES
from domain.phases import TERMINAL_PHASES, Phase
from infra.db import events


class IllegalTransition(Exception):
    """The requested phase cannot follow the workload's current phase."""


_BEFORE = {phase: sorted(p.value for p, following in NEXT_PHASES.items() if phase in following) for phase in Phase}
"""For each phase, the phases from which it can be entered."""

# If the event's unique key already exists, the statement changes nothing.
_ENTER = text(
    "with told as ("
    " insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)"
    " select 'workload.' || cast(:phase as text), tenant, id, attempt, region, cast(:reason as jsonb),"
    " cast(:detail as jsonb), attempt || ':' || cast(:phase as text)"
    " from workload where id = :workload and phase = any(:before)"
    " on conflict on constraint event_once do nothing returning workload"
    "), moved as ("
    " update workload set phase = cast(:phase as text), reason = cast(:reason as jsonb),"
    " region = case when :leaves then null else region end,"
    " finished_at = case when :ends then now() else finished_at end"
    " where id in (select workload from told)"
    "), explained as ("
    " delete from waiting where :ends and workload in (select workload from told)"
    f") select pg_notify('{events.CHANNEL}', '') from told"
)
_WHERE_IT_IS = text(
    "select phase, exists ("
    " select from event where workload = w.id and dedup = w.attempt || ':' || cast(:phase as text)"
    ") from workload as w where id = :workload"
)


def enter_phase(
    session: Session,
    workload: str,
    phase: Phase,
    reason: Mapping[str, Any],
    detail: Mapping[str, Any] | None = None,
    *,
    leaves: bool = False,
) -> bool:
    """Moves a workload to `phase`. Returns False, and changes nothing, if its current attempt was in it before.

    The caller must have locked the workload's row. A final phase also deletes the explanation in `waiting`. Loaded ORM
    objects of the row are not refreshed.

    Args:
        session: the session whose transaction holds the lock.
        workload: the workload's id.
        phase: the new phase.
        reason: the reason, stored in the row and in the event.
        detail: the detail of the event.
        leaves: whether the workload leaves its region, which sets its region to null.

    Raises:
        IllegalTransition: `phase` cannot follow the current phase.
    """
    values = {
        "workload": workload,
        "phase": phase.value,
        "before": _BEFORE[phase],
        "reason": json.dumps(reason),
        "detail": json.dumps(detail or {}),
        "leaves": leaves,
        "ends": phase in TERMINAL_PHASES,
    }
    if session.execute(_ENTER, values).first() is not None:
        return True
    present, done = session.execute(_WHERE_IT_IS, {"workload": workload, "phase": phase.value}).one()
    if not done:
        raise IllegalTransition(f"workload {workload}: {phase.value} cannot follow {present}")
    return False
