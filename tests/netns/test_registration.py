"""Registration of a machine: which attempts on it may continue, according to Postgres."""

import pytest
from sqlalchemy import Engine

from activities.lifecycle.machines import MachineActivities
from domain.protocol.machines import Attend, Hello
from infra.config.settings import Settings
from infra.db.models import Allocation, Attempt, Machine, Region, Workload
from infra.db.session import transaction
from infra.db.tenants import Tenant
from tests.activities.world import key

MACHINE = "east/c/a"
HELLO = Hello(MACHINE, "east", "c", "rack-1", "a100", 1, 4000, 1 << 30, "10.0.0.1", "boot.1", key(), ["wl-1.1"])
ATTEND = Attend(MACHINE, HELLO.incarnation, [])


@pytest.fixture
def machines(database: Engine) -> MachineActivities:
    """The machine activities; one machine is ready, and the first attempt of a workload holds its slot."""
    with transaction(database) as session:
        session.add_all([Region(name="east", bucket_url="file:///nowhere"), Tenant(name="vision", level=3)])
        session.flush()
    machines = MachineActivities(database, Settings())
    machines.register(HELLO)
    machines.ready(ATTEND)
    amounts = {"cpus_milli": 1000, "memory_bytes": 1 << 20, "awaited_cpus_milli": 0, "awaited_memory_bytes": 0}
    with transaction(database) as session:
        session.add(Workload(id="wl-1", tenant="vision", name="one", spec={}, phase="running", attempt=1))
        session.flush()
        session.add(Attempt(workload="wl-1", attempt=1, region="east", plan={}, gpu_types={"a100": 1}, cpus_milli=1000))
        session.flush()
        session.add(Allocation(workload="wl-1", attempt=1, machine=MACHINE, slots=1, awaited=0, **amounts))
    return machines


def test_restarted_agent_keeps_its_tasks(machines: MachineActivities) -> None:
    """An agent that restarts on a machine that was not lost stops no attempt."""
    assert machines.register(HELLO).stop == []


def test_lost_machine_gives_up_all_it_ran(machines: MachineActivities, database: Engine) -> None:
    """A lost machine stops all its attempts before it is ready again, even attempts that still hold slots there.

    The list of attempts to stop stays the same if the agent restarts in between.
    """
    machines.lost(ATTEND)
    for _ in range(2):
        assert machines.register(HELLO).stop == ["wl-1.1"]
        with transaction(database) as session:
            assert session.get_one(Machine, MACHINE).state == "joining"
    machines.ready(ATTEND)
    assert machines.register(HELLO).stop == []
