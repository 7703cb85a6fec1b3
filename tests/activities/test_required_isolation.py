"""Workloads that require an isolation of tasks run only on machines that have it, and say so while they wait."""

from typing import Any

import pytest

from domain.isolation import Isolation
from infra.db.tenants import Tenant
from tests.activities.staging import stage_launch
from tests.activities.world import World

OPEN, USERS, CLOSED = "r/c/a-open", "r/c/b-users", "r/c/c-closed"


@pytest.fixture
def fleet(world: World) -> World:
    """A region with a machine of each mode, of which schedulers prefer the open one by its name."""
    world.region("r")
    for machine, mode in ((OPEN, "none"), (USERS, "user")):
        world.machine(machine, 4, isolation=mode)
    return world


@pytest.mark.parametrize("by", ["document", "tenant"])
def test_only_machines_with_the_mode_are_used(fleet: World, by: str) -> None:
    """The reason names the weaker machines; a machine with the mode, or one that gets it, wakes the scheduler."""
    more: dict[str, Any] = {"isolation": Isolation.SANDBOX} if by == "document" else {}
    if by == "tenant":
        with fleet.session() as session:
            session.get_one(Tenant, "t").isolation = "sandbox"
    workload = fleet.submit(**more)
    assert fleet.tick().awarded == 0
    assert fleet.waiting(workload) == ["insufficient_capacity r", "isolation_too_weak r"]
    assert fleet.reasons(workload)[-1]["detail"]["machines"] == [OPEN, USERS]
    wakes = fleet.put_out("wake")
    fleet.machines.register(fleet.hello(USERS, 4, isolation="sandbox"))
    assert fleet.put_out("wake") == wakes + 1
    assert fleet.tick().awarded == 1
    assert fleet.holdings(workload).keys() == {USERS}


def test_the_stronger_requirement_counts(fleet: World) -> None:
    """A document cannot ask for less than its tenant requires; without a requirement, every machine is used."""
    any_machine = fleet.submit()
    assert fleet.tick().awarded == 1
    assert fleet.holdings(any_machine).keys() == {OPEN}
    with fleet.session() as session:
        session.get_one(Tenant, "t").isolation = "user"
    workload = fleet.submit(isolation=Isolation.NONE)
    assert fleet.tick().awarded == 1
    assert fleet.holdings(workload).keys() == {USERS}
    assert stage_launch(fleet, workload)[1].isolation is Isolation.USER
