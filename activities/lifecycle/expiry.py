"""Ends workloads that have been queued for longer than `limits.max_pending`."""

from sqlalchemy import Engine, text

from domain.phases import QUEUED_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from infra.db.queued_end import end_queued
from infra.db.session import transaction

_EXPIRED = text(
    "select w.id, round(extract(epoch from now() - eligible.since))::bigint,"
    " (w.spec -> 'limits' ->> 'max_pending_s')::float8"
    " from workload as w left join attempt as a on a.workload = w.id and a.attempt = w.attempt"
    " cross join lateral (select greatest(coalesce(a.released_at, w.submitted_at), w.unheld_at) as since) as eligible"
    # The condition of the index `workload_expiring`.
    " where w.finished_at is null and w.spec -> 'limits' ->> 'max_pending_s' is not null"
    " and w.phase = any(:phases) and w.held_by is null"
    " and extract(epoch from now() - eligible.since)"
    " > (w.spec -> 'limits' ->> 'max_pending_s')::float8"
    " order by w.id for update of w skip locked"
)


def expire_pending(engine: Engine) -> list[str]:
    """Fails the workloads that have been eligible for too long; returns their ids.

    Held workloads do not expire, and the end of a hold starts the time again.
    """
    code = ReasonCode.PENDING_EXPIRED
    with transaction(engine) as session:
        found = session.execute(_EXPIRED, {"phases": sorted(QUEUED_PHASES)}).all()
        ending = {}
        for workload, waited_s, limit_s in found:
            detail = {"waited_s": waited_s, "limit_s": limit_s, "code": code.value}
            ending[workload] = Reason(code, detail), detail
        end_queued(session, Phase.FAILED, ending)
        return list(ending)
