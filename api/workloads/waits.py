"""How long workloads have waited: since their submission, and since they could last be placed."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import ARRAY, Text, any_, bindparam, select
from sqlalchemy.orm import Session

from api.workloads.reasons import Row
from domain.phases import QUEUED_PHASES, Phase
from infra.db.models import Attempt

_RELEASED = select(Attempt.workload, Attempt.attempt, Attempt.released_at).where(
    Attempt.workload == any_(bindparam("ids", type_=ARRAY(Text)))
)


class Waits(NamedTuple):
    """How long a workload has waited, in seconds."""

    waited_s: float
    """Since its submission, without the time on hold, until its end. It counts for credit and reservations."""
    eligible_s: float | None
    """Since it could last be placed: since its submission, its last attempt or its last hold, whichever ended last.
    None: it is not queued, or is on hold."""


def waits_of(session: Session, rows: Sequence[Row]) -> dict[str, Waits]:
    """Returns how long each workload has waited, by id."""
    again = [row.id for row in rows if row.attempt and Phase(row.phase) in QUEUED_PHASES and row.held_by is None]
    found = session.execute(_RELEASED, {"ids": again}).all() if again else []
    released = {(workload, attempt): at for workload, attempt, at in found}
    now = datetime.now(UTC)
    out = {}
    for row in rows:
        ends = [at for at in (row.finished_at, row.held_at) if at is not None]
        waited_s = (min(ends, default=now) - row.submitted_at).total_seconds() - row.paused_s
        eligible_s = None
        if Phase(row.phase) in QUEUED_PHASES and row.held_by is None:
            since = (row.submitted_at, row.unheld_at, released.get((row.id, row.attempt)))
            eligible_s = max(0.0, (now - max(at for at in since if at is not None)).total_seconds())
        out[row.id] = Waits(max(0.0, waited_s), eligible_s)
    return out
