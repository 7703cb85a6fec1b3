"""Elastic jobs: an attempt has as many tasks as fit, within the tenant's quota, and everything follows its number."""

import pytest
from sqlalchemy import text

from activities.scheduling import awards
from domain.demand import demand_of
from domain.phases import Phase
from domain.reasons import ReasonCode
from domain.spec import LimitsSpec
from infra.db.buckets import BucketState, publish_bucket
from infra.db.tenants import Tenant
from tests.activities.invariants import check
from tests.activities.staging import stage_launch
from tests.activities.world import World, job


@pytest.fixture
def fleet(world: World) -> World:
    """One region with a machine of three slots."""
    world.region("r")
    world.machine("r/c/m1", 3)
    return world


def test_each_attempt_has_as_many_tasks_as_fit(fleet: World) -> None:
    """An attempt has 3 tasks of 2 to 8 where 3 fit, and the next one 7. Slots, use and the launch follow the number."""
    elastic = fleet.running(job(tasks=2, most_tasks=8))
    assert (fleet.attempt(elastic).gpu_types, fleet.attempt(elastic).cpus_milli) == ({"a100": 3}, 300)
    assert fleet.holdings(elastic) == {"r/c/m1": (0b111, 0)}
    plan, launch = stage_launch(fleet, elastic)
    assert plan.tasks == 3
    main = launch.jobs["main"]
    assert (main.tasks, main.min_tasks, main.max_tasks, main.saved_tasks) == (3, 2, 8, None)
    assert [(one.task, one.rank, one.world_size, one.slots) for one in launch.tasks] == [
        (task, task, 3, (task,)) for task in range(3)
    ]
    fleet.saved(elastic, 5.0)
    fleet.machine("r/c/m2", 4)
    fleet.change(elastic, Phase.CHECKPOINTING)
    fleet.release(elastic, Phase.PREEMPTED)
    fleet.tick()
    assert (fleet.attempt(elastic, 2).gpu_types, len(fleet.holdings(elastic))) == ({"a100": 7}, 2)
    main = stage_launch(fleet, elastic, 2)[1].jobs["main"]
    assert (main.tasks, main.saved_tasks) == (7, 3)
    check(fleet)


def test_tasks_above_the_fewest_keep_within_the_quota(fleet: World) -> None:
    """With a quota of 3, of which another workload needs 1, an elastic workload of 1 to 8 tasks gets 2.

    Over quota, it gets what is free.
    """
    fleet.machine("r/c/m2", 4)
    fleet.alter(Tenant, "t", quota_gpus={"a100": 3})
    elastic, other = fleet.submit(job(tasks=1, most_tasks=8)), fleet.submit(job())
    fleet.tick()
    assert fleet.attempt(elastic).gpu_types == {"a100": 2} and fleet.attempt(other).gpu_types == {"a100": 1}
    fleet.run(elastic)
    fleet.scan()
    assert (fleet.attempt(elastic).rank, fleet.attempt(other).rank) == (3, 3)
    over = fleet.running(job(tasks=2, most_tasks=8))
    assert (fleet.attempt(over).gpu_types, fleet.attempt(over).rank) == ({"a100": 4}, 10)


def test_evictions_are_only_for_the_fewest_tasks(fleet: World) -> None:
    """An elastic workload that must evict gets its fewest tasks, and the victim continues with what is left."""
    fleet.tenant("low", 6)
    victim = fleet.running(job(tasks=1, most_tasks=3), tenant="low")
    assert fleet.attempt(victim).gpu_types == {"a100": 3}
    evictor = fleet.submit(job(tasks=2, most_tasks=3))
    fleet.tick()
    assert fleet.attempt(evictor).gpu_types == {"a100": 2}
    fleet.release(victim, Phase.PREEMPTED)
    fleet.tick()
    assert fleet.attempt(victim, 2).gpu_types == {"a100": 1}
    check(fleet)


def test_what_schedulers_read_of_an_elastic_job(world: World) -> None:
    """The demand that Postgres derives from the document is that of the document; without a range, it is as before."""
    for one in (job(tasks=2, most_tasks=8), job(tasks=2)):
        workload = world.submit(one)
        with world.session() as session:
            ask = session.execute(text("select ask from workload where id = :id"), {"id": workload}).scalar_one()
        assert demand_of(ask).jobs == (one.request(),)


def test_a_running_workload_grows_into_free_slots(fleet: World) -> None:
    """When a machine joins that nobody waits for, a workload with 3 of 8 tasks is stopped and continues with 7.

    The slots are its own from then on, and its next attempt is awarded as the first one leaves.
    """
    elastic = fleet.running(job(tasks=2, most_tasks=8))
    fleet.saved(elastic, 5.0)
    fleet.tick()
    assert fleet.mail(elastic, "preempt") == []
    fleet.machine("r/c/m2", 4)
    fleet.tick()
    (told,) = fleet.mail(elastic, "preempt")
    assert told["detail"] == {"code": "resized", "tasks": 3, "more": 7}
    other = fleet.submit(job(gpus=4), level=1)
    fleet.tick()
    assert fleet.workload(other).phase == "pending" and len(fleet.mail(elastic, "preempt")) == 1
    check(fleet)
    fleet.change(elastic, Phase.CHECKPOINTING)
    fleet.release(elastic, Phase.PREEMPTED, code=ReasonCode.RESIZED)
    check(fleet)
    assert (fleet.workload(elastic).phase, fleet.workload(elastic).attempt) == ("placing", 2)
    assert fleet.attempt(elastic, 2).gpu_types == {"a100": 7}
    main = stage_launch(fleet, elastic, 2)[1].jobs["main"]
    assert (main.tasks, main.saved_tasks) == (7, 3)


@pytest.mark.parametrize("why", ["quota", "recent", "waiting", "unsaved", "ending", "bucket", "off"])
def test_a_workload_does_not_grow(fleet: World, why: str) -> None:
    """It does not grow beyond its quota, soon after its start, into slots that another workload takes, if that loses
    more work than it gains, if earlier attempts have used most of its runtime, while it could not save because the
    region's bucket fails, or if the setting is off.
    """
    settings = {"recent": {"min_runtime_s": 900}, "off": {"grow": False}}
    fleet.configure(**settings.get(why, {}))
    if why == "quota":
        fleet.alter(Tenant, "t", quota_gpus={"a100": 3})
    limits, ago_s = LimitsSpec(max_runtime_s=7200), 6400.0 if why == "ending" else 600.0
    elastic = fleet.running(job(tasks=2, most_tasks=8), limits=limits, ago_s=ago_s)
    if why == "ending":
        fleet.release(elastic, Phase.PREEMPTED)
        fleet.tick()
        fleet.run(elastic, 600.0)
    fleet.saved(elastic, 50_000.0 if why == "unsaved" else 5.0)
    fleet.machine("r/c/m2", 4)
    if why == "bucket":
        with fleet.session() as session:
            publish_bucket(session, "r", BucketState("file:///x", failing_since_s=1.0, error="x"))
    if why == "waiting":
        fleet.submit(job(gpus=4), level=6)
    fleet.tick()
    assert fleet.mail(elastic, "preempt") == []


@pytest.mark.parametrize("regions", [1, 2])
def test_workloads_that_grow_share_the_quota(world: World, regions: int) -> None:
    """Two elastic workloads have 2 tasks each, and their tenant has a quota of 6. When 4 slots become free for each of
    them, one grows to 4 tasks, which uses up the quota. The other does not grow, also while the first one saves.
    """
    world.tenant("quota", 3, 6)
    elastic = []
    for k in range(2):
        region = f"r{k % regions}"
        if k < regions:
            world.region(region)
        world.machine(f"{region}/c/small{k}", 2)
        elastic.append(world.running(job(tasks=1, most_tasks=8), tenant="quota"))
        world.saved(elastic[-1], 5.0)
        assert world.attempt(elastic[-1]).gpu_types == {"a100": 2}
    for k in range(2):
        world.machine(f"r{k % regions}/c/big{k}", 4)
    world.tick()
    world.tick()
    told = [message["detail"] for one in elastic for message in world.mail(one, "preempt")]
    assert told == [{"code": "resized", "tasks": 2, "more": 4}]
    late = world.submit(job(), tenant="quota")
    world.scan()
    assert world.auction._scanned is not None and world.auction._scanned.batch(0, 1)[0].rank > 7, (
        f"{late} is over quota"
    )
    state = type(world.scheduler_state)(world.engine, world.settings.scheduler)
    with state.current() as now:  # A scheduler that starts now reads the same.
        assert state.queue.scan(now.now_s).order.size == 1
    for one in elastic:
        if world.mail(one, "preempt"):
            world.release(one, Phase.PREEMPTED, code=ReasonCode.RESIZED)
    world.scan()
    assert [world.attempt(one).rank for one in elastic] == [3, 3]


@pytest.mark.parametrize("why", ["silent", "conflict"])
def test_a_workload_does_not_take_what_a_waiting_one_gets_next(
    fleet: World, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a waiting workload fits, but its region did not bid or its award failed, nothing grows in its place."""
    elastic = fleet.running(job(tasks=2, most_tasks=8))
    fleet.saved(elastic, 5.0)
    fleet.machine("r/c/m2", 4)
    waits = fleet.submit(job(gpus=4), level=6)
    with monkeypatch.context() as patched:
        if why == "conflict":
            stale = awards.Awarded(0, awards.AwardFailure.STALE)
            patched.setattr(awards, "award", lambda _, planned: (list(planned), stale)[1])
        fleet.tick(*(["r"] if why == "silent" else []))
    assert fleet.workload(waits).phase == "pending" and fleet.mail(elastic, "preempt") == []
    fleet.tick()
    assert list(fleet.holdings(waits)) == ["r/c/m2"]
