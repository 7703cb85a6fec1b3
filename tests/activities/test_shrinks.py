"""Elastic workloads on Postgres that are evicted and keep a part of their slots."""

from typing import Any

import pytest

from api.workloads.reasons import why_all
from domain.phases import Phase
from infra.db import published_queue
from infra.db.buckets import BucketState, publish_bucket
from infra.db.models import Machine, Workload
from tests.activities.invariants import check, check_history
from tests.activities.staging import stage_launch
from tests.activities.world import World, job

pytestmark = pytest.mark.usefixtures("publishes_every_scan")
MACHINES = [f"r/c/m{n}" for n in range(1, 3)]


@pytest.fixture
def fleet(world: World) -> World:
    """One region with two machines of four slots. The tenant `poor` has no quota: its workloads are over-quota."""
    world.region("r")
    for machine in MACHINES:
        world.machine(machine, 4)
    world.tenant("poor", 5, 0)
    world.tenant("rich", 2, 1000)
    world.configure(shrink=True)
    return world


def victim(world: World, tasks: int = 2, **more: Any) -> str:
    """Returns a running elastic workload that has all 8 slots, 8 tasks of at least `tasks`."""
    return world.running(job(tasks=tasks, most_tasks=9), tenant="poor", **more)


def leave(world: World, workload: str, silent: tuple[str, ...] = ()) -> None:
    """Ends an attempt that was evicted, as its workflow does."""
    world.change(workload, Phase.CHECKPOINTING)
    world.release(workload, Phase.PREEMPTED, silent=silent)
    check(world)


def why(world: World, workload: str) -> list[str]:
    with world.session() as session:
        row = session.get_one(Workload, workload)
        return [one.sentence for one in why_all(session, published_queue.Newest(), [row])[workload].reasons]


def test_a_victim_continues_with_what_its_evictor_leaves(fleet: World) -> None:
    """It has 5 of its 8 tasks again as soon as it has saved, before others of its rank; the event and `why` say it."""
    elastic = victim(fleet)
    waiting = fleet.submit(job(gpus=4), tenant="poor")
    urgent = fleet.submit(job(gpus=3), tenant="rich")
    fleet.tick()
    assert fleet.attempt(elastic).evictor == urgent
    leave(fleet, elastic)
    assert (fleet.workload(elastic).phase, fleet.workload(elastic).attempt) == ("placing", 2)
    assert sum(held.bit_count() for held, _ in fleet.holdings(elastic).values()) == 5
    assert sum(held.bit_count() for held, _ in fleet.holdings(urgent).values()) == 3
    last, shrunk = fleet.events(elastic)[-1], {"tasks": 8, "fewer": 5, "evictor": urgent}
    assert last["kind"] == "workload.placing" and last["detail"]["shrunk"] == shrunk
    assert fleet.mail(elastic)[-1]["kind"] == "awarded" and fleet.mail(elastic)[-1]["detail"]["ready"]
    said = f"shrunk from 8 to 5 tasks for {urgent}, which has evicted it; it continues from its checkpoint"
    assert why(fleet, elastic)[0] == said
    main = stage_launch(fleet, elastic, 2)[1].jobs["main"]
    assert (main.tasks, main.min_tasks) == (5, 2)
    fleet.run(elastic)
    assert said in why(fleet, elastic)
    fleet.tick()
    assert not fleet.holdings(waiting)
    fleet.release(elastic, Phase.SUCCEEDED)
    check_history(fleet)


def test_it_has_the_protection_of_a_new_start(fleet: World) -> None:
    """Workloads that come one by one do not stop it each time: it is evicted again only after its minimum runtime."""
    fleet.configure(min_runtime_s=1000.0)
    elastic = victim(fleet, ago_s=2000.0)
    fleet.submit(job(gpus=3), tenant="rich")
    fleet.tick()
    leave(fleet, elastic)
    fleet.run(elastic)
    later = fleet.submit(job(gpus=3), tenant="rich")
    fleet.tick()
    assert not fleet.holdings(later)
    fleet.run(elastic, 1001.0)
    fleet.tick()
    assert fleet.attempt(elastic).evictor == later
    check(fleet)


@pytest.mark.parametrize(
    "case", ["off", "fewest", "ahead", "more", "reserved", "bucket", "one_attempt", "cordoned", "held", "silent"]
)
def test_what_returns_to_the_queue(fleet: World, case: str) -> None:
    """The victim is queued if too little is left, if another workload comes first, or if it may not stay there."""
    fleet.configure(shrink=case != "off")
    elastic = victim(fleet, 6 if case == "fewest" else 2, one_attempt=case == "one_attempt", ago_s=2000.0)
    if case == "reserved":  # A gang will wait for the end of a protection, and for what is left of the victim.
        fleet.configure(min_runtime_s=1000.0, reserve_after_s=1000.0)
        fleet.machine("r/c/m3", 4)
        fleet.running(job(gpus=4), tenant="poor", ago_s=0.0)
    fleet.submit(job(gpus=4), tenant="rich", id_="w-evicts")
    if case == "reserved":
        fleet.submit(job(tasks=2, gpus=4), tenant="rich")
    if case == "ahead":  # It is over-quota, too, but of a better level.
        fleet.tenant("scarce", 1, 0)
        fleet.submit(job(gpus=2), tenant="scarce")
    fleet.tick()
    assert fleet.attempt(elastic).evictor == "w-evicts"
    left = next(machine for machine in MACHINES if machine not in fleet.holdings("w-evicts"))
    if case == "more":
        fleet.machine("r/c/m3", 4)
    elif case == "bucket":
        with fleet.session() as session:
            publish_bucket(session, "r", BucketState("file:///x", failing_since_s=1.0, error="x"))
    elif case == "cordoned":
        fleet.alter(Machine, left, cordon={"code": "x", "detail": {}})
    elif case == "held":
        fleet.alter(Workload, elastic, held_by="x")
    leave(fleet, elastic, (left,) if case == "silent" else ())
    assert (fleet.workload(elastic).phase, fleet.workload(elastic).attempt) == ("preempted", 1)
