"""Why workloads wait: every region's reason, written where it is not what is written already."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, select, text

from domain.phases import QUEUED_PHASES
from domain.reasons import Reason
from infra.db.logs import Waiting
from infra.db.session import transaction

_WRITE = text(
    # Locked first: who is awarded or ends at the same moment gets no reasons afterwards.
    "with queued as (select id from workload where id = any(:ids) and phase = any(:phases) order by id for update)"
    " insert into waiting (workload, reasons)"
    " select n.id, n.body::jsonb from unnest(cast(:ids as text[]), cast(:bodies as text[])) as n (id, body)"
    " join queued on queued.id = n.id order by n.id"
    " on conflict (workload) do update set reasons = excluded.reasons, at = now()"
)


def explain(engine: Engine, waiting: Mapping[str, Sequence[Reason]]) -> None:
    """Publishes why workloads wait, each with its reasons in order; those that wait no more get none."""
    if not waiting:
        return
    with transaction(engine) as session:
        written = select(Waiting.workload, Waiting.reasons).where(Waiting.workload.in_(sorted(waiting)))
        known = {workload: body["reasons"] for workload, body in session.execute(written)}
        # Most are as they were: sentences are made for the others only.
        new = {w: reasons for w, reasons in waiting.items() if not _says(known.get(w), reasons)}
        if new:
            texts = [json.dumps({"reasons": [r.to_json() for r in reasons]}) for reasons in new.values()]
            session.execute(_WRITE, {"ids": list(new), "phases": sorted(QUEUED_PHASES), "bodies": texts})


def _says(written: list[dict[str, Any]] | None, reasons: Sequence[Reason]) -> bool:
    """Whether these reasons are written already, with their numbers."""
    return written is not None and [(w["code"], w["detail"]) for w in written] == [
        (reason.code.value, reason.detail) for reason in reasons
    ]
