"""Ends workloads that wait in the queue. They hold no resources and no promises, so only database rows change."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.util import identity_key

from domain.phases import QUEUED_PHASES, Phase
from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason
from infra.db import events, outbox
from infra.db.models import Workload

_END = text(
    "with ending as (select id, reason::jsonb as reason from unnest(cast(:ids as text[]), cast(:reasons as text[]))"
    " as e (id, reason)"
    "), ended as ("
    " update workload as w set phase = cast(:phase as text), reason = e.reason, finished_at = now() from ending as e"
    " where w.id = e.id and w.phase = any(:queued)"
    " returning w.id, w.tenant, w.attempt, w.region, w.reason, w.finished_at"
    "), written as ("
    " insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)"
    " select 'workload.' || cast(:phase as text), tenant, id, attempt, region, reason, '{}',"
    " attempt || ':' || cast(:phase as text) from ended"
    "), explained as ("
    " delete from waiting using ended where waiting.workload = ended.id"
    # A workload that was never placed has no workflow.
    "), messages as ("
    " insert into outbox (kind, workload, body) select 'mail', id, jsonb_build_object('kind', cast(:mail as text),"
    " 'attempt', attempt, 'detail', cast(:details as jsonb) -> id) from ended where attempt > 0"
    "), audited as ("
    " insert into audit (actor, tenant, action, target, detail)"
    " select :actor, tenant, :action, id, '{}' from ended where cast(:actor as text) is not null"
    "), wakes as (insert into outbox (kind, body) values ('wake', '{}')"
    "), noticed as ("
    f" select pg_notify('{events.CHANNEL}', ''), pg_notify('{outbox.CHANNEL}', '')"
    ") select id, reason, finished_at from ended cross join noticed"
)


def end_queued(
    session: Session,
    phase: Phase,
    ending: Mapping[str, tuple[Reason, Mapping[str, Any]]],
    *,
    actor: str | None = None,
    action: str = "",
) -> None:
    """Ends queued workloads in `phase`: updates their rows, writes events, and sends messages to existing workflows.

    The caller must have locked the workloads' rows. An award takes the same locks, so a workload is either ended before
    it is placed, or the caller sees that it is placed.

    Args:
        session: the session whose transaction holds the locks.
        phase: the final phase.
        ending: for each workload id the reason, and the detail of the message that ends its workflow.
        actor: who requested the end, for the audit list; None writes no audit entry.
        action: the action for the audit list.
    """
    if ending:
        ended = session.execute(
            _END,
            {
                "ids": list(ending),
                "reasons": [json.dumps(reason.to_json()) for reason, _ in ending.values()],
                "details": json.dumps({workload: dict(detail) for workload, (_, detail) in ending.items()}),
                "phase": phase.value,
                "queued": sorted(QUEUED_PHASES),
                "mail": MessageKind.CANCEL.value,
                "actor": actor,
                "action": action,
            },
        )
        for id_, reason, finished_at in ended:
            row = session.identity_map.get(identity_key(Workload, id_))
            if row is not None:  # Update the loaded object to match the database, without reading the row again.
                for name, value in (("phase", phase.value), ("reason", reason), ("finished_at", finished_at)):
                    set_committed_value(row, name, value)
