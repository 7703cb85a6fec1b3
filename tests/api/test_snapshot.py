"""The snapshot of the fleet for the simulator."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import update

from domain.live import LiveSnapshot
from domain.phases import Phase
from domain.spec import WorkloadSpec
from infra.db.models import Allocation, Attempt, Machine, Workload
from infra.db.tables import Partition, Replica
from infra.db.tenants import Tenant
from simulation.live import live_scenario
from simulation.policies import POLICIES
from simulation.run import Run
from simulation.settings import SimulationSettings
from tests.api.calls import get
from tests.api.world import ApiWorld

M1, M2 = "north/alpha/m1", "north/alpha/m2"


async def test_a_snapshot_says_what_runs_and_what_waits(world: ApiWorld) -> None:
    """The snapshot has schedulable machines, quotas, and all live workloads with their held or promised resources."""
    now = datetime.now(UTC)
    running, queued = world.add_workload(Phase.RUNNING), world.add_workload(Phase.PREEMPTED, tables=("digits",))
    leaving, coming = world.add_workload(Phase.CHECKPOINTING, level=7), world.add_workload(Phase.PLACING)
    world.add_workload(Phase.SUCCEEDED)
    ended = now - timedelta(hours=1)
    began = ended - timedelta(minutes=30)
    world.add_attempt(running, 1, M2, 0b1, awarded_at=began, started_at=began, released_at=ended)
    world.add_attempt(running, 2, M1, 0b11, started_at=now - timedelta(minutes=10))
    world.add_attempt(leaving, 1, M1, 0b100, evicting_since=now, evictor=coming)
    world.add_attempt(coming, 1, M1, 0)
    with world.session() as session:
        session.execute(update(Allocation).where(Allocation.workload == coming).values(awaited=0b100))
        session.execute(update(Attempt).where(Attempt.workload == coming).values(gpu_types={"a100": 1}))
        session.get_one(Machine, M2).draining = True
        session.get_one(Workload, queued).held_by = "key-vision"
        spec = session.get_one(Workload, coming).spec
        spanning = {**spec, "jobs": [{**job, "span_clusters": True} for job in spec["jobs"]]}
        session.get_one(Workload, coming).spec = spanning
    body = await get(world, "/v1/snapshot")
    live = LiveSnapshot.model_validate(body)
    assert [m.id for m in live.machines] == [M1, "south/beta/c1", "south/beta/m1"]
    assert {t.name: (t.level, t.quota_gpus, t.quota_cpus_milli) for t in live.tenants} == {
        "speech": (5, {"v100": 4}, None),
        "vision": (3, {"a100": 8}, 64_000),
    }
    by_id = {w.id: w for w in live.workloads}
    assert by_id[coming].jobs == WorkloadSpec.model_validate(spanning).requests() != by_id[running].jobs
    assert list(by_id) == sorted([running, queued, leaving, coming])
    placed = by_id[running].placement
    assert placed is not None and placed.started_at is not None
    assert [(h.machine, h.gpus, h.cpus_milli) for h in placed.holdings] == [(M1, 2, 2000)]
    assert 2400 <= by_id[running].ran_s < 2460, "expected the time of both attempts"
    assert (by_id[queued].regions, by_id[queued].held, by_id[queued].placement) == (("north",), True, None)
    assert (by_id[leaving].placement, by_id[leaving].level) == (None, 7)
    heir = by_id[coming].placement
    assert heir is not None and heir.started_at is None
    assert [(h.machine, h.gpus) for h in heir.holdings] == [(M1, 1)], "promised slots are missing"
    assert "argv" not in str(body) and "hf-token" not in str(body)


async def test_high_priority_may_be_only_where_its_data_is_complete(world: ApiWorld) -> None:
    """A workload of high priority may not run in a region with a stale replica, one of low priority may."""
    with world.session() as session:
        session.add(Replica(data_table="digits", region="south", state="ready"))
    with world.session() as session:
        session.add(Partition(data_table="digits", name="new", location="tables/digits/new/", size_bytes=1))
    queued = world.add_workload(Phase.PENDING, tables=("digits",))
    for level, regions in ((3, ("north", "south")), (2, ("north",))):
        with world.session() as session:
            session.get_one(Tenant, "vision").level = level
        live = LiveSnapshot.model_validate(await get(world, "/v1/snapshot"))
        assert {w.id: w.regions for w in live.workloads} == {queued: regions}


async def test_a_simulation_starts_from_a_snapshot(world: ApiWorld) -> None:
    """In a simulation from a snapshot, running workloads continue, queued ones are placed, and all finish."""
    running, queued = world.add_workload(Phase.RUNNING), world.add_workload(Phase.PENDING)
    world.add_attempt(running, 1, M1, 0b11, started_at=datetime.now(UTC) - timedelta(minutes=10))
    live = LiveSnapshot.model_validate(await get(world, "/v1/snapshot"))
    run = Run(live_scenario(live, SimulationSettings(), seed=1), POLICIES["global"]).go()
    lives = {life.workload.id: life for life in run.simulator.transitions.states}
    assert run.simulator.progress.finished == 2
    assert lives[running].attempt == 1 and lives[queued].attempt == 1
    assert lives[queued].place == "north"


async def test_the_simulator_gets_no_slots_that_owners_have_taken(world: ApiWorld) -> None:
    """GPUs that the owner has taken are not counted. A slot that a workload still holds counts until it is free."""
    running = world.add_workload(Phase.RUNNING)
    world.add_attempt(running, 1, M1, 0b1)
    with world.session() as session:
        machine = session.get_one(Machine, M1)
        there, machine.withheld = machine.gpus, 0b11
    live = LiveSnapshot.model_validate(await get(world, "/v1/snapshot"))
    assert {m.id: m.gpus for m in live.machines}[M1] == there - 1
