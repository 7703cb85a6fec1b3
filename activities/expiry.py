"""Workloads that wait for longer than they allow (`limits.max_pending`): their workflows are told to end them."""

from sqlalchemy import Engine, text

from domain.phases import QUEUED_PHASES
from domain.protocol import MailKind
from domain.reasons import ReasonCode
from infra.db import outbox
from infra.db.session import transaction

_AGAIN_S = 60.0
"""Mail that had no effect, since its workflow was lost with Temporal's state, is repeated after this time."""
_EXPIRED = text(
    "select w.id, w.attempt, round(extract(epoch from now() - coalesce(a.released_at, w.submitted_at)))::bigint,"
    " (w.spec -> 'limits' ->> 'max_pending_s')::float8"
    " from workload as w left join attempt as a on a.workload = w.id and a.attempt = w.attempt"
    # The condition of the index `workload_expiring`.
    " where w.finished_at is null and w.spec -> 'limits' ->> 'max_pending_s' is not null"
    " and w.phase = any(:phases) and w.held_by is null"
    " and extract(epoch from now() - coalesce(a.released_at, w.submitted_at))"
    " > (w.spec -> 'limits' ->> 'max_pending_s')::float8"
    " and not exists (select from outbox as o where o.workload = w.id and o.body -> 'detail' ->> 'code' = :code"
    " and (o.delivered_at is null or o.created_at > now() - make_interval(secs => :again_s)))"
    " order by w.id for update of w skip locked"
)


def expire_pending(engine: Engine) -> list[str]:
    """Tells the workflows of workloads that have waited too long; returns their ids. Held ones do not expire."""
    code = ReasonCode.PENDING_EXPIRED.value
    with transaction(engine) as session:
        found = session.execute(_EXPIRED, {"phases": sorted(QUEUED_PHASES), "code": code, "again_s": _AGAIN_S}).all()
        for workload, attempt, waited_s, limit_s in found:
            detail = {"waited_s": waited_s, "limit_s": limit_s, "code": code}
            outbox.mail(session, workload, MailKind.CANCEL, attempt, **detail)
        return [workload for workload, *_ in found]
