"""Computes the work that an interruption of an attempt loses, from the attempt's row."""

from domain.lost_work import lost_work_s
from infra.db.models import Attempt


def lost_by(attempt: Attempt, until_s: float) -> float:
    """Returns the seconds of work that an interruption at `until_s` (epoch seconds) loses (`domain.lost_work`).

    For a replica of a service that has been ready, it is its cold start.
    """
    if attempt.cold_start_s is not None:
        return attempt.cold_start_s
    return lost_work_s(
        began_s=None if attempt.started_at is None else attempt.started_at.timestamp(),
        saved_s=None if attempt.checkpoint_at is None else attempt.checkpoint_at.timestamp(),
        until_s=until_s,
        step=attempt.last_step,
        saved_step=attempt.checkpoint_step if attempt.checkpoint_step is not None else attempt.resumed_step,
        step_s=(attempt.cadence or {}).get("step_s"),
    )
