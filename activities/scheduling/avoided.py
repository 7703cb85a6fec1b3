"""The machines that a queued workload avoids: those on which it failed, if the failure is not confirmed.

`lifecycle.suspicion` decides that a failure on machines that owners lend is not confirmed, and which ones to avoid. A
lent machine that did not start the workload in time is avoided, too.
"""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.reasons import ReasonCode

AVOIDED = timedelta(hours=1)
"""How long. If no other machine can take the workload in this time, the same machine may get it again."""
_CODES = [ReasonCode.UNCONFIRMED_FAILURE.value, ReasonCode.LAUNCH_TIMED_OUT.value]
_FAILED = text(
    "select workload, array_agg(distinct machine)"
    " from attempt, jsonb_array_elements_text(outcome -> 'detail' -> 'avoided') as machine"
    " where workload = any(:ids) and outcome ->> 'code' = any(:codes)"
    " and released_at > now() - cast(:avoided as interval)"
    " group by workload"
)


def avoided_by(session: Session, workloads: Sequence[str]) -> dict[str, frozenset[str]]:
    """Returns the machines that each of these workloads avoids; workloads that avoid none are left out."""
    values = {"ids": workloads, "codes": _CODES, "avoided": AVOIDED}
    return {workload: frozenset(machines) for workload, machines in session.execute(_FAILED, values).all()}
