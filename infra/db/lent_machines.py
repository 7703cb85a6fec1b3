"""Which machines owners lend."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.capacity import CapacityKind
from infra.db.models import Cluster, Machine


def lent_of(session: Session, machines: Mapping[str, Machine]) -> set[str]:
    """Returns the ids of the machines that owners lend."""
    found = select(Cluster.region, Cluster.name).where(Cluster.capacity == CapacityKind.VOLUNTARY.value)
    clusters = {(region, name) for region, name in session.execute(found)}
    return {id_ for id_, machine in machines.items() if (machine.region, machine.cluster) in clusters}
