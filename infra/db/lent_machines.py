"""Which machines owners lend."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.capacity import CapacityKind
from infra.db.models import Cluster, Machine

_LENT = select(Cluster.region, Cluster.name).where(Cluster.capacity == CapacityKind.VOLUNTARY.value)


def lent_of(session: Session, machines: Mapping[str, Machine]) -> set[str]:
    """Returns the ids of the machines that owners lend."""
    clusters = {(region, name) for region, name in session.execute(_LENT)}
    return {id_ for id_, machine in machines.items() if (machine.region, machine.cluster) in clusters}
