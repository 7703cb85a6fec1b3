"""Selects workloads by filters: for lists, and for actions on all that match."""

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from api.auth import Caller
from api.problems import invalid
from api.workloads.elements import elements_of, shown_in
from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from infra.db.models import Workload

Phases = Sequence[Phase | Literal["held", "blocked", "live"]]
"""Phases, `held` and `blocked` (queued workloads that are on hold or wait for others), and `live` (not ended)."""


def matching(
    caller: Caller,
    *,
    tenant: str | None = None,
    phase: Phases | None = None,
    label: Sequence[str] | None = None,
    name: str | None = None,
    array: str | None = None,
) -> Select[Any]:
    """Returns the statement of the workloads that the caller may see and that match all filters.

    Args:
        caller: the caller of the request.
        tenant: the only tenant.
        phase: the only phases.
        label: labels, each as `key=value`.
        name: the only name.
        array: elements of this array that were placed; None: workloads that are no elements.

    Raises:
        Problem: 422, a label has not the form `key=value`.
    """
    wanted = select(Workload).where(Workload.array_id.is_(None) if array is None else elements_of(array))
    for only in (caller.tenant, tenant):
        if only is not None:
            wanted = wanted.where(Workload.tenant == only)
    if phase:
        queued = Workload.phase.in_(sorted(QUEUED_PHASES))
        live = Workload.phase.not_in(sorted(TERMINAL_PHASES))
        also = {"held": Workload.held_by.is_not(None) & queued, "live": live}
        also["blocked"] = Workload.blocked.is_not(None) & queued
        wanted = wanted.where(or_(shown_in(phase), *(also[name] for name in phase if name in also)))
    for pair in label or ():
        wanted = wanted.where(Workload.labels.contains(_label(pair)))
    if name is not None:
        wanted = wanted.where(Workload.name == name)
    return wanted


def _label(pair: str) -> dict[str, str]:
    key, equals, value = pair.partition("=")
    if not (key and equals):
        raise invalid("query.label", "must have the form key=value", pair)
    return {key: value}


def live_matching(session: Session, wanted: Select[Any], upto: str | None, most: int) -> list[str]:
    """Returns the ids of the first `most` live workloads of a statement of `matching`, newest first.

    `upto`: only workloads that were not submitted after this one.
    """
    wanted = wanted.with_only_columns(Workload.id).where(Workload.finished_at.is_(None))
    if upto is not None:
        wanted = wanted.where(Workload.id <= upto)
    return list(session.scalars(wanted.order_by(Workload.id.desc()).limit(most)))


def count_live(session: Session, wanted: Select[Any], most: int) -> int:
    """Returns the number of live workloads of a statement of `matching`, counted up to `most`."""
    counted = wanted.with_only_columns(Workload.id).where(Workload.finished_at.is_(None)).limit(most).subquery()
    return session.scalar(select(func.count()).select_from(counted)) or 0
