"""Repair in place on Postgres: which gangs keep their machines when one is lost, and who holds each slot meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func

import activities.lifecycle.workloads as workloads
from domain.phases import Phase
from domain.reasons import ReasonCode
from infra.db.buckets import BucketState, publish_bucket
from infra.db.models import Attempt, Cluster, Eviction, Machine, Workload
from tests.activities.invariants import check, check_history
from tests.activities.world import World, job

MACHINES = [f"r/c/m{n}" for n in range(1, 5)]


@pytest.fixture
def fleet(world: World) -> World:
    """One region with four machines of four slots. The tenant `poor` has no quota: its workloads are over-quota."""
    world.region("r")
    for machine in MACHINES:
        world.machine(machine, 4)
    world.tenant("poor", 5, 0)
    world.tenant("rich", 2, 1000)
    world.configure(repair=True)
    return world


def gang(world: World, gpus: int = 4, **more: Any) -> tuple[str, list[str], str]:
    """Returns a running gang of three tasks on three machines, these machines, and the other one."""
    found = world.running(job(tasks=3, gpus=gpus), tenant="poor", **more)
    used = sorted(world.holdings(found))
    (spare,) = set(MACHINES) - set(used)
    return found, used, spare


def lose(world: World, workload: str, machine: str, **more: Any) -> None:
    """Loses a machine and ends the attempt of a workload as its workflow does."""
    world.machines.lost(world.attend(machine))
    world.change(workload, Phase.CHECKPOINTING)
    world.release(workload, Phase.PENDING, blames=machine, silent=[machine], **more)
    check(world)


def test_a_gang_keeps_its_machines_and_gets_a_spare(fleet: World) -> None:
    """It continues at once, before a workload that waits for the same slots; the event says which machines it keeps."""
    hurt, used, spare = gang(fleet)
    waiting = fleet.submit(job(tasks=2, gpus=4), tenant="poor")
    lose(fleet, hurt, used[1])
    assert (fleet.workload(hurt).phase, fleet.workload(hurt).attempt) == ("placing", 2)
    assert sorted(fleet.holdings(hurt)) == sorted({used[0], used[2], spare})
    assert (fleet.attempt(hurt, 1).outcome or {})["code"] == "machine_lost"
    last = fleet.events(hurt)[-1]
    assert [e["kind"] for e in fleet.events(hurt)][-2:] == ["workload.pending", "workload.placing"]
    assert last["detail"]["kept"] == [used[0], used[2]]
    told = fleet.mail(hurt)
    assert told[-1]["kind"] == "awarded" and told[-1]["detail"]["ready"]
    assert [m["kind"] for m in told if m["attempt"] == 1] == ["awarded", "machine_lost"]
    assert not fleet.holdings(waiting)
    fleet.run(hurt)
    fleet.release(hurt, Phase.SUCCEEDED)
    check_history(fleet)


def test_it_has_the_protection_of_a_new_start(fleet: World) -> None:
    """As after a wait in the queue, the gang is not evicted before its minimum runtime has passed."""
    fleet.configure(min_runtime_s=1000.0)
    hurt, used, _ = gang(fleet, ago_s=2000.0)
    lose(fleet, hurt, used[0])
    fleet.run(hurt)
    urgent = fleet.submit(job(tasks=3, gpus=4), tenant="rich")
    fleet.tick()
    assert not fleet.holdings(urgent)
    fleet.run(hurt, 1001.0)
    fleet.tick()
    assert fleet.holdings(urgent) and fleet.attempt(hurt).evictor == urgent
    check(fleet)


def test_off_by_default(fleet: World) -> None:
    """Without the setting, the gang is queued and all its slots are free."""
    fleet.configure(repair=False)
    hurt, used, _ = gang(fleet)
    lose(fleet, hurt, used[0])
    assert fleet.workload(hurt).phase == "pending" and all(fleet.masks(m) == (0, 0) for m in MACHINES)


@pytest.mark.parametrize(
    "case",
    ["no_spare", "other_region", "cordoned", "lent", "one_attempt", "held", "evicted", "reserved", "bucket",
     "other_reason"],
)  # fmt: skip
def test_what_returns_to_the_queue(fleet: World, case: str) -> None:
    """The gang is queued if it lacks a spare, may not continue in place, or somebody with priority has a claim."""
    if case == "reserved":
        fleet.configure(min_runtime_s=5000.0, reserve_after_s=0.0)
    hurt, used, spare = gang(fleet, one_attempt=case == "one_attempt")
    if case == "no_spare":
        fleet.running(job(gpus=1), tenant="poor")
    elif case == "other_region":
        fleet.running(job(gpus=1), tenant="poor")
        fleet.region("s")
        fleet.machine("s/c/m5", 4)
    elif case == "cordoned":
        fleet.alter(Machine, spare, cordon={"code": "x", "detail": {}})
    elif case == "lent":
        fleet.alter(Cluster, ("r", "c"), capacity="voluntary")
    elif case == "held":
        fleet.alter(Workload, hurt, held_by="x")
    elif case == "evicted":
        fleet.submit(job(tasks=2, gpus=4), tenant="rich")
        fleet.tick()
    elif case == "reserved":
        fleet.submit(job(tasks=4, gpus=4), tenant="rich")
        fleet.tick()
    elif case == "bucket":  # Nothing is placed where a checkpoint cannot be loaded.
        with fleet.session() as session:
            publish_bucket(session, "r", BucketState("file:///x", failing_since_s=1.0, error="x"))
    if case == "other_reason":
        fleet.release(hurt, Phase.PREEMPTED, code=ReasonCode.STACK_STOPPED)
    else:
        lose(fleet, hurt, used[0])
    assert fleet.workload(hurt).attempt == 1 and fleet.attempt(hurt).released_at


def test_a_machine_that_is_only_silent_is_not_kept(fleet: World) -> None:
    """The workflow may find the loss before the machine's own: the gang leaves it, and it takes no work meanwhile."""
    hurt, used, spare = gang(fleet)
    fleet.release(hurt, Phase.PENDING, blames=used[0], silent=[used[0]])
    assert sorted(fleet.holdings(hurt)) == sorted({*used[1:], spare})
    assert fleet.unconfirmed() == [(used[0], f"{hurt}.1")]
    check(fleet)


def urgent_gang(world: World) -> tuple[str, list[str], str, str]:
    """Returns a running gang of three tasks that may evict, its machines, and the workload on the other machine."""
    victim = world.running(job(gpus=4), tenant="poor", ago_s=700.0)
    hurt = world.running(job(tasks=3, gpus=4), tenant="rich")
    (spare,) = world.holdings(victim)
    return hurt, sorted(world.holdings(hurt)), victim, spare


def test_a_victim_nearby_makes_room(fleet: World) -> None:
    """Without a free slot, it keeps its machines and evicts as the queue would; it starts when the victim has left."""
    hurt, used, victim, spare = urgent_gang(fleet)
    lose(fleet, hurt, used[1])
    assert (fleet.workload(hurt).phase, fleet.workload(hurt).attempt) == ("placing", 2)
    assert fleet.evictions() == {(hurt, 2, victim, 1)} and fleet.attempt(victim).evictor == hurt
    assert fleet.mail(victim, "evict") and not fleet.mail(hurt)[-1]["detail"]["ready"]
    held = {machine for machine in MACHINES if fleet.masks(machine)[0] and machine != spare}
    assert held == {used[0], used[2]}
    assert fleet.events(hurt)[-1]["detail"] == {
        "kept": [used[0], used[2]], "machines": sorted([used[0], used[2], spare]), "victims": [victim], "rank": 2,
    }  # fmt: skip
    fleet.change(victim, Phase.CHECKPOINTING)
    fleet.release(victim, Phase.PREEMPTED)
    assert fleet.mail(hurt)[-1]["kind"] == "slots_ready"
    check(fleet)
    fleet.run(hurt)
    fleet.release(hurt, Phase.SUCCEEDED)
    check_history(fleet)


@pytest.mark.parametrize("case", ["protected", "leaves", "immune"])
def test_when_nothing_is_evicted_for_it(fleet: World, case: str) -> None:
    """The gang is queued if the victim is protected, leaves already, or has evicted the gang."""
    hurt, used, victim, _ = urgent_gang(fleet)
    if case == "protected":
        fleet.configure(min_runtime_s=800.0)
    elif case == "leaves":
        fleet.alter(Attempt, (victim, 1), evicting_since=func.now())
    else:
        with fleet.session() as session:
            session.add(Eviction(evictor=victim, evictor_attempt=1, victim=hurt, victim_attempt=1))
    lose(fleet, hurt, used[0])
    assert fleet.workload(hurt).attempt == 1 and fleet.attempt(hurt).released_at


def test_two_gangs_that_are_released_at_once_get_different_places(world: World) -> None:
    """Of two gangs that lose their machines together, each sees what the other one has got."""
    world.configure(repair=True)
    world.region("r")
    for n in range(6):
        world.machine(f"r/c/m{n}", 4)
    gangs = [world.running(job(tasks=3, gpus=4)) for _ in range(2)]
    lost = {one: min(world.holdings(one)) for one in gangs}
    for spare in ("r/c/m8", "r/c/m9"):
        world.machine(spare, 4)
    for one in gangs:
        world.machines.lost(world.attend(lost[one]))
        world.change(one, Phase.CHECKPOINTING)
    with ThreadPoolExecutor() as pool:
        released = [pool.submit(world.release, one, Phase.PENDING, blames=m, silent=[m]) for one, m in lost.items()]
    assert [one.result() for one in released] == [None, None]
    assert [world.workload(one).attempt for one in gangs] == [2, 2]
    check(world)


def test_a_spare_that_is_lost_before_the_release(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the place does not hold any more, the gang waits in the queue; nothing is half awarded."""
    plain = workloads.place_repaired

    def late(*arguments: Any) -> Any:
        found = plain(*arguments)
        fleet.machines.lost(fleet.attend(spare))
        return found

    hurt, used, spare = gang(fleet)
    monkeypatch.setattr(workloads, "place_repaired", late)
    lose(fleet, hurt, used[0])
    assert (fleet.workload(hurt).phase, fleet.workload(hurt).attempt) == ("pending", 1)
    assert all(fleet.masks(m) == (0, 0) for m in MACHINES)
