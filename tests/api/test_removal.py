"""Removal of machines and regions: refused with a list of what depends on them."""

from sqlalchemy import select

from domain.phases import Phase
from infra.db.logs import Audit, Event
from infra.db.models import Machine, Workload
from infra.db.tables import Replica, Table
from tests.api.calls import get
from tests.api.world import ApiWorld

M1 = "/v1/machines/north/alpha/m1"


async def _delete(world: ApiWorld, path: str, key: str = "operator") -> tuple[int, str]:
    async with world.client(key) as client:
        answer = await client.delete(path)
        return answer.status_code, answer.json()["detail"] if answer.content else ""


async def test_a_machine_is_removed_when_it_is_drained_and_empty(world: ApiWorld) -> None:
    """A machine with slots in use or not drained cannot be removed; a removal keeps its history and is audited."""
    running, done = world.add_workload(Phase.RUNNING), world.add_workload(Phase.RUNNING)
    world.add_attempt(running, 1, "north/alpha/m1", 0b1)
    world.add_attempt(done, 1, "north/alpha/m1", 0b10, released_at="2026-01-01T00:00:00Z")
    assert (await _delete(world, M1, "vision"))[0] == 403
    status, said = await _delete(world, M1)
    assert status == 409
    assert said == (
        f"machine north/alpha/m1 cannot be removed: workloads that hold slots there: {running}; it is ready and not "
        "drained; drain it first (`mizzen machines drain north/alpha/m1`)"
    )
    with world.session() as session:
        session.get_one(Machine, "north/alpha/m1").draining = True
    assert (await _delete(world, M1))[0] == 409
    with world.session() as session:
        session.connection().exec_driver_sql("update allocation set released_at = now() where released_at is null")
    assert await _delete(world, M1) == (204, "")
    assert (await _delete(world, M1))[0] == 404
    assert "north/alpha/m1" not in [m["id"] for m in (await get(world, "/v1/machines"))["items"]]
    (kept,) = (await get(world, f"/v1/workloads/{done}/allocations"))["items"]
    assert kept["machine"] == "north/alpha/m1"
    with world.session() as session:
        assert session.scalars(select(Event.kind)).all() == ["machine.removed"]
        assert session.scalars(select(Audit.target).where(Audit.action == "machine.remove")).all() == ["north/alpha/m1"]


async def test_a_region_is_removed_when_nothing_is_there(world: ApiWorld) -> None:
    """A region with machines, tables or checkpoints cannot be removed; lost machines can be removed without a drain."""
    with world.session() as session:
        session.add(Table(name="words", home_region="south"))
        session.flush()
        session.add(Replica(data_table="words", region="south", state="ready"))
    saved = world.add_workload(Phase.PREEMPTED, checkpoint_region="south")
    status, said = await _delete(world, "/v1/regions/south")
    assert status == 409
    machines = "machines: south/beta/c1, south/beta/m1; "
    data = "tables with their home there: words; replicas of tables: words; "
    assert f"{machines}{data}checkpoints of workloads: {saved}; " in said, said
    with world.session() as session:
        for machine in ("c1", "m1"):
            session.get_one(Machine, f"south/beta/{machine}").state = "lost"
        session.delete(session.get_one(Workload, saved))
        session.connection().exec_driver_sql("delete from data_table where home_region = 'south'")
    for machine in ("c1", "m1"):
        assert (await _delete(world, f"/v1/machines/south/beta/{machine}"))[0] == 204
    assert await _delete(world, "/v1/regions/south") == (204, "")
    assert [region["name"] for region in (await get(world, "/v1/regions"))["items"]] == ["north"]
    assert (await get(world, "/v1/clusters", region="south"))["items"] == []
    assert (await _delete(world, "/v1/regions/south"))[0] == 404
