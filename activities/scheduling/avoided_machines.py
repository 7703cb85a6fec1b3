"""The machines that a queued workload avoids: those on which it failed, if the failure is not confirmed, those with too
weak isolation, and for an image those without a container engine.

`domain.lifecycle.suspicion` decides that a failure on machines that owners lend is not confirmed, and which ones to
avoid. A lent machine that did not start the workload in time is avoided, too.

Doubted machines are used only if no other has room (`PlanQuality.doubts`). Only a machine itself says what it has. One
that accepts work and never starts it would otherwise get all work, because it is always free.
"""

from collections.abc import Collection, Mapping
from datetime import timedelta
from math import inf
from typing import NamedTuple

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from domain.capacity import CapacityKind
from domain.isolation import Isolation
from domain.reasons import ReasonCode
from infra.db.models import Machine

AVOIDED = timedelta(hours=1)
"""How long. If no other machine can take the workload in this time, the same machine may get it again."""
_CODES = [ReasonCode.UNCONFIRMED_FAILURE.value, ReasonCode.LAUNCH_TIMED_OUT.value]
_FAILED = text(
    "select workload, array_agg(distinct machine),"
    " extract(epoch from min(released_at) + cast(:avoided as interval))::float8"
    " from attempt, jsonb_array_elements_text(outcome -> 'detail' -> 'avoided') as machine"
    " where workload = any(:ids) and outcome ->> 'code' = any(:codes)"
    " and released_at > now() - cast(:avoided as interval)"
    " group by workload"
)
_DOUBTED = text(
    "select m.id, m.failed_gangs > 0 as has_failed from machine as m"
    " join cluster as c on c.region = m.region and c.name = m.cluster"
    " where c.capacity = :kind and (m.failed_gangs > 0 or m.answered_at is null)"
)


class Avoided(NamedTuple):
    """The machines that a workload avoids, by cause."""

    failed: frozenset[str] = frozenset()
    until_s: float = inf
    """When it may use the first machine again on which it failed."""
    too_open: frozenset[str] = frozenset()
    """Machines whose isolation is too weak."""
    no_engine: frozenset[str] = frozenset()
    """Machines without a container engine, if it has an image."""

    @property
    def machines(self) -> frozenset[str]:
        """All machines that it may not use."""
        return self.failed | self.too_open | self.no_engine


NOTHING_AVOIDED = Avoided()


def avoided_by(
    session: Session, required: Mapping[str, Isolation], with_image: Collection[str] = ()
) -> dict[str, Avoided]:
    """Returns the machines that each workload avoids; workloads that avoid no machine are left out.

    `required` has the weakest mode of isolation that each of the workloads allows, and `with_image` those with images.
    """
    values = {"ids": list(required), "codes": _CODES, "avoided": AVOIDED}
    rows = session.execute(_FAILED, values).all()
    found = {workload: Avoided(frozenset(machines), until_s) for workload, machines, until_s in rows}
    below = weaker_machines(session, set(required.values()))
    for workload, mode in required.items():
        if below[mode]:
            found[workload] = found.get(workload, NOTHING_AVOIDED)._replace(too_open=below[mode])
    if with_image and (no_engine := without_engine(session)):
        for workload in with_image:
            found[workload] = found.get(workload, NOTHING_AVOIDED)._replace(no_engine=no_engine)
    return found


def without_engine(session: Session) -> frozenset[str]:
    """Returns the machines that have no container engine."""
    return frozenset(session.scalars(select(Machine.id).where(Machine.engine.is_(None))))


def weaker_machines(session: Session, modes: Collection[Isolation]) -> dict[Isolation, frozenset[str]]:
    """Returns the machines whose isolation is weaker than each of `modes`."""
    if not any(mode.rank for mode in modes):
        return dict.fromkeys(modes, frozenset())
    rows = session.execute(select(Machine.id, Machine.isolation)).all()
    return {mode: frozenset(machine for machine, own in rows if Isolation(own).rank < mode.rank) for mode in modes}


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
