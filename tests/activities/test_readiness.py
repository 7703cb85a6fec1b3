"""Readiness of a replica as its agent reports it."""

import pytest

from activities.services.readiness import record_readiness
from domain.reported import ServingReport, TaskProgress
from infra.db.services import ServiceReplica, ServiceRow, ServiceVersion
from tests.activities.world import World


@pytest.mark.parametrize("place", [("10.0.0.1 weight 9", 80), ("fe80::1%eth0", 80), ("a", 0), ("a", 65_536), ("a", -1)])
def test_an_address_that_cannot_be_one_is_ignored(world: World, place: tuple[str, int]) -> None:
    """The balancer refuses the whole list of a service with such an address, so it is not written."""
    workload = world.submit()
    with world.session() as session:
        session.add(ServiceRow(id="sv-1", tenant="t", name="chat"))
        session.flush()
        session.add(ServiceVersion(service="sv-1", version=1, spec={}))
        session.flush()
        session.add(ServiceReplica(service="sv-1", number=0, version=1, workload=workload, kind="spot", is_base=True))

    def report(address: str, port: int) -> tuple[bool, str | None, int | None]:
        report = ServingReport(address, port, True, 1.0)
        record_readiness(world.engine, workload, [TaskProgress("main", 0, serving=report)])
        with world.session() as session:
            row = session.get_one(ServiceReplica, ("sv-1", 0))
            return row.ready, row.address, row.port

    assert report(*place) == (False, None, None)
    assert report("10.0.0.1", 80) == (True, "10.0.0.1", 80)
