"""Changes phases of workloads in one statement: updates the rows, writes the events and notifies readers."""

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

# For a workload whose event's unique key already exists, the statement changes nothing.
_ENTER = text(
    "with asked as ("
    " select * from jsonb_to_recordset(cast(:moves as jsonb)) as m (workload text, reason jsonb, detail jsonb)"
    "), told as ("
    " insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)"
    " select 'workload.' || cast(:phase as text), w.tenant, w.id, w.attempt, w.region, m.reason, m.detail,"
    " w.attempt || ':' || cast(:phase as text)"
    " from asked as m join workload as w on w.id = m.workload where w.phase = any(:before) order by w.id"
    " on conflict on constraint event_once do nothing returning workload, reason"
    "), moved as ("
    " update workload as w set phase = cast(:phase as text), reason = told.reason,"
    " region = case when :leaves then null else region end,"
    " finished_at = case when :ends then now() else finished_at end"
    " from told where w.id = told.workload"
    "), explained as ("
    " delete from waiting where :ends and workload in (select workload from told)"
    f") select workload, pg_notify('{events.CHANNEL}', '') from told"
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
    """Moves one workload to `phase`. Returns False, without a change, if its current attempt was in it before.

    The same as `enter_phases` for one workload.
    """
    return bool(enter_phases(session, phase, {workload: (reason, detail or {})}, leaves=leaves))


def enter_phases(
    session: Session,
    phase: Phase,
    moves: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    leaves: bool = False,
) -> set[str]:
    """Moves workloads to `phase`. Returns those that moved: not those whose current attempt has been in it before.

    The caller must have locked the workloads' rows. A final phase also deletes the explanations in `waiting`. Loaded
    ORM objects of the rows are not refreshed.

    Args:
        session: the session whose transaction holds the locks.
        phase: the new phase.
        moves: for each workload, the reason, stored in its row and in the event, and the detail of the event.
        leaves: whether the workloads leave their regions, which sets their regions to null.

    Raises:
        IllegalTransition: `phase` cannot follow the current phase of a workload.
    """
    asked = [{"workload": one, "reason": reason, "detail": detail} for one, (reason, detail) in moves.items()]
    values = {
        "moves": json.dumps(asked),
        "phase": phase.value,
        "before": _BEFORE[phase],
        "leaves": leaves,
        "ends": phase in TERMINAL_PHASES,
    }
    moved = {row.workload for row in session.execute(_ENTER, values)}
    for workload in moves.keys() - moved:
        present, done = session.execute(_WHERE_IT_IS, {"workload": workload, "phase": phase.value}).one()
        if not done:
            raise IllegalTransition(f"workload {workload}: {phase.value} cannot follow {present}")
    return moved
