"""Selects workloads by filters: for lists, and for actions on all that match."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import Select, func, or_, select, tuple_
from sqlalchemy.orm import Session

from api.auth import Caller
from api.problems import invalid
from api.workloads.elements import elements_of, is_begun_array, is_placed, shown_in
from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from infra.db.models import Workload

Phases = Sequence[Phase | Literal["held", "blocked", "live"]]
"""Phases, `held` and `blocked` (queued workloads that are on hold or wait for others), and `live` (not ended)."""


@dataclass(frozen=True)
class Filters:
    """The filters of a list of workloads. A workload matches all of them."""

    tenant: str | None = None
    """The only tenant."""
    phase: Phases | None = None
    """The only phases."""
    label: Sequence[str] | None = None
    """Labels, each as `key=value`."""
    name: str | None = None
    """The only name."""
    array: str | None = None
    """Elements of this array that were placed; None: workloads that are no elements."""


def matching(caller: Caller, filters: Filters) -> Select[Any]:
    """Returns the statement of the workloads that the caller may see and that match the filters.

    Raises:
        Problem: 422, a label has not the form `key=value`.
    """
    array, phase = filters.array, filters.phase
    wanted = select(Workload).where(Workload.array_id.is_(None) if array is None else elements_of(array))
    for only in (caller.tenant, filters.tenant):
        if only is not None:
            wanted = wanted.where(Workload.tenant == only)
    if phase:
        is_live, queued = Workload.finished_at.is_(None), Workload.phase.in_(sorted(QUEUED_PHASES))
        also = {"live": is_live, "held": Workload.held_by.is_not(None) & queued & is_live}
        also["blocked"] = Workload.blocked.is_not(None) & queued & is_live
        phases = [name for name in phase if name not in also]
        wanted = wanted.where(
            or_(*([shown_in(phases)] if phases else []), *(also[name] for name in phase if name in also))
        )
    for pair in filters.label or ():
        wanted = wanted.where(Workload.labels.contains(_label(pair)))
    if filters.name is not None:
        wanted = wanted.where(Workload.name == filters.name)
    return wanted


_AFTER_ALL = "zz"
"""Follows all ids of workloads."""


def newest(caller: Caller, filters: Filters, *, before: str | None, most: int) -> list[Select[Any]]:
    """Returns statements that together have the `most` newest workloads of `matching`; `before`: only older ones.

    Where an index has the rows of a filter in this order, the statement is written as a range of that index. With an
    equality in its place, Postgres can choose to go through all workloads, because it does not know that, for example,
    the newest ones have not failed yet.
    """
    if filters.array is None and list(filters.phase or ()) == [Phase.RUNNING]:
        wanted = matching(caller, replace(filters, phase=None))
        conditions = is_placed() & (Workload.phase == Phase.RUNNING), is_begun_array()
        return [_in_order(wanted.where(one), [], before, most) for one in conditions]
    wanted = matching(caller, filters)
    keys = [] if filters.array is not None else _keys(filters.tenant or caller.tenant, filters.phase, filters.name)
    return [_in_order(wanted, keys, before, most)]


def _in_order(wanted: Select[Any], keys: Sequence[tuple[Any, str]], before: str | None, most: int) -> Select[Any]:
    columns, values = [column for column, _ in keys], [value for _, value in keys]
    order = (*(column.desc() for column in columns), Workload.id.desc())
    if keys:
        # Not an equality: Postgres would drop these columns from the order, and could then use the primary key.
        wanted = wanted.where(tuple_(*columns) >= tuple_(*values))
    if keys or before is not None:
        wanted = wanted.where(tuple_(*columns, Workload.id) < tuple_(*values, before or _AFTER_ALL))
    return wanted.order_by(*order).limit(most)


def _keys(tenant: str | None, phase: Phases | None, name: str | None) -> list[tuple[Any, str]]:
    """Returns columns with their only values, in the order of an index; empty: the primary key, or a partial index."""
    if name is not None:
        return [(Workload.name, name)]
    only = phase[0] if phase and len(phase) == 1 else None
    own = [] if tenant is None else [(Workload.tenant, tenant)]
    if only in TERMINAL_PHASES:
        return [*own, (Workload.phase, only)]
    return own if only in (None, "live", Phase.PENDING) else []


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
