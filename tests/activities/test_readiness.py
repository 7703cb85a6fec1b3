"""Readiness of a replica as its agent reports it."""

import math

import pytest

from activities.lifecycle.beats import Beat
from activities.services.readiness import record_readiness
from domain.protocol.machines import NodeHeartbeat
from domain.task_reports import ServingReport, TaskProgress
from infra.db.services import ServiceReplica, ServiceRow, ServiceVersion
from tests.activities.world import World


@pytest.mark.parametrize("place", [("10.0.0.1 weight 9", 80), ("fe80::1%eth0", 80), ("a", 0), ("a", 65_536), ("a", -1)])
def test_an_address_that_cannot_be_one_is_ignored(world: World, place: tuple[str, int]) -> None:
    """The balancer refuses the whole list of a service with such an address, so it is not written."""
    workload, machine = _replica(world)

    def report(address: str, port: int) -> tuple[bool, str | None, int | None]:
        return _after(world, workload, machine, ServingReport(address, port, True, 1.0))

    assert report(*place) == (False, None, None)
    assert report("10.0.0.1", 80) == (True, "10.0.0.1", 80)


def test_a_machine_does_not_report_for_the_task_of_another(world: World) -> None:
    """Requests go to the address of a task as the agent of its own machine reports it."""
    workload, machine = _replica(world)
    report = ServingReport("10.0.0.1", 80, True, 1.0)
    assert _after(world, workload, "r/c/other", report) == (False, None, None)
    assert _after(world, workload, machine, report) == (True, "10.0.0.1", 80)


def test_a_load_is_stored_if_it_can_be_one(world: World) -> None:
    """The newest load is stored; what cannot be a load counts as none."""
    workload, machine = _replica(world)
    for load, stored in ((12.5, 12.5), (0.0, 0.0), (-1.0, None), (math.inf, None), (7.0, 7.0), (None, None)):
        _after(world, workload, machine, ServingReport("10.0.0.1", 80, True, 1.0, load=load))
        with world.session() as session:
            assert session.get_one(ServiceReplica, ("sv-1", 0)).load == stored


def _replica(world: World) -> tuple[str, str]:
    """Returns the workload of a replica that runs, and its machine."""
    world.region("r")
    world.machine("r/c/m", 4)
    workload = world.running()
    with world.session() as session:
        session.add(ServiceRow(id="sv-1", tenant="t", name="chat"))
        session.flush()
        session.add(ServiceVersion(service="sv-1", version=1, spec={}))
        session.flush()
        session.add(ServiceReplica(service="sv-1", number=0, version=1, workload=workload, kind="spot", is_base=True))
    return workload, "r/c/m"


def _after(world: World, workload: str, machine: str, report: ServingReport) -> tuple[bool, str | None, int | None]:
    """Returns whether and where the replica is ready after a heartbeat of `machine` with a report of its only task."""
    said = NodeHeartbeat([TaskProgress("main", 0, serving=report)], 1)
    record_readiness(world.engine, workload, [Beat(machine, 0.0, said)])
    with world.session() as session:
        row = session.get_one(ServiceReplica, ("sv-1", 0))
        return row.ready, row.address, row.port
