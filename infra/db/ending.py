"""Ending workloads that wait in the queue: they hold nothing, and nothing is promised to them, so a row says it all."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.phases import QUEUED_PHASES, Phase
from domain.protocol import MailKind
from domain.reasons import Reason
from infra.db import events, outbox
from infra.db.models import Workload

_END = text(
    "with ending as (select id, reason::jsonb as reason from unnest(cast(:ids as text[]), cast(:reasons as text[]))"
    " as e (id, reason)"
    "), ended as ("
    " update workload as w set phase = cast(:phase as text), reason = e.reason, finished_at = now() from ending as e"
    " where w.id = e.id and w.phase = any(:queued) returning w.id, w.tenant, w.attempt, w.region, w.reason"
    "), written as ("
    " insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)"
    " select 'workload.' || cast(:phase as text), tenant, id, attempt, region, reason, '{}',"
    " attempt || ':' || cast(:phase as text) from ended"
    "), explained as ("
    " delete from waiting using ended where waiting.workload = ended.id"
    # A workload that was never placed has no workflow.
    "), mails as ("
    " insert into outbox (kind, workload, body) select 'mail', id, jsonb_build_object('kind', cast(:mail as text),"
    " 'attempt', attempt, 'detail', cast(:details as jsonb) -> id) from ended where attempt > 0"
    "), wakes as (insert into outbox (kind, body) values ('wake', '{}'))"
    f" select pg_notify('{events.CHANNEL}', ''), pg_notify('{outbox.CHANNEL}', '')"
)


def end_queued(session: Session, phase: Phase, ending: Mapping[str, tuple[Reason, Mapping[str, Any]]]) -> None:
    """Ends queued workloads, whose rows the caller has locked: row, event, and mail to the workflows that there are.

    `ending` is id to the reason, and to the detail of the mail by which a workflow comes to the same end. An award
    takes the same locks, so a workload is ended before it is placed, or found placed by the caller.
    """
    if ending:
        session.execute(
            _END,
            {
                "ids": list(ending),
                "reasons": [json.dumps(reason.to_json()) for reason, _ in ending.values()],
                "details": json.dumps({workload: dict(detail) for workload, (_, detail) in ending.items()}),
                "phase": phase.value,
                "queued": sorted(QUEUED_PHASES),
                "mail": MailKind.CANCEL.value,
            },
        )
        for row in session.identity_map.values():
            if isinstance(row, Workload) and row.id in ending:
                session.expire(row)
