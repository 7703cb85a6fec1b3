"""The machines that owners lend and that are used only if no other has room: `PlanQuality.doubts`.

Only a machine itself says what it has. One that accepts work and never starts it would otherwise get all work, because
it is always free.
"""

from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.capacity import CapacityKind

_DOUBTED = text(
    "select m.id, m.failed_gangs > 0 as has_failed from machine as m"
    " join cluster as c on c.region = m.region and c.name = m.cluster"
    " where c.capacity = :kind and (m.failed_gangs > 0 or m.answered_at is null)"
)


class Doubted(NamedTuple):
    """The doubted machines, as in `PlacementRequest`."""

    failed: frozenset[str] = frozenset()
    untried: frozenset[str] = frozenset()


NO_DOUBTS = Doubted()


def doubted(session: Session) -> Doubted:
    """Returns the lent machines that failed since their last success, and lent machines that have run nothing yet."""
    rows = session.execute(_DOUBTED, {"kind": CapacityKind.VOLUNTARY.value}).all()
    failed = frozenset(row.id for row in rows if row.has_failed)
    return Doubted(failed, frozenset(row.id for row in rows) - failed)
