"""A recorded run of the live scheduler, replayed in the simulator: the same order, on the same machines."""

import random
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.fleet.snapshot import get_snapshot
from domain.live import LiveSnapshot
from domain.phases import Phase
from domain.reasons import ReasonCode
from domain.spec import LimitsSpec
from simulation.live import live_scenario
from simulation.policies import POLICIES
from simulation.run import Run, Scenario
from simulation.settings import SimulationSettings
from simulation.transitions import Happened
from tests.activities.world import World, job
from tests.depth import few
from tests.simulation.scenarios import losing

Award = tuple[str, tuple[str, ...]]
"""A workload and its machines."""
PROTECTED_S = 1e9
"""Nothing is evicted, so that ends alone release slots."""


def _fill(world: World, seed: int) -> dict[str, float]:
    """Adds machines, tenants and a queue; returns the maximum runtimes in seconds."""
    chance = random.Random(seed)
    for tenant, level, gpus in (("urgent", 1, 8), ("usual", 3, 1000), ("poor", 2, 3)):
        world.tenant(tenant, level=level, gpus=gpus)
    for region in ("east", "west"):
        world.region(region)
        for n in range(3):
            world.machine(f"{region}/c/m{n}", chance.choice([2, 4, 8]), rack=f"k{n % 2}")
    runtimes_s = {f"w-{n:02d}": chance.uniform(100, 10_000) for n in range(30)}
    for name, runtime_s in runtimes_s.items():
        world.submit(
            job(tasks=chance.choice([1, 1, 2, 3]), gpus=chance.choice([1, 1, 2])), id_=name,
            tenant=chance.choice(["urgent", "usual", "usual", "poor"]), limits=LimitsSpec(max_runtime_s=runtime_s),
            regions_excluded=("west",) if chance.random() < 0.2 else (),
        )  # fmt: skip
    return runtimes_s


def _recorded(world: World, runtimes_s: dict[str, float]) -> list[Award]:
    """Serves the queue, and ends each workload after its maximum runtime on a virtual clock; returns the awards."""
    awards: list[Award] = []
    ends_s: dict[str, float] = {}
    now_s = 0.0
    while len(awards) < len(runtimes_s) or ends_s:
        ticket = world.bid()
        queue = world.queue()
        world.award(ticket)
        placed = [name for name in queue if world.holdings(name)]
        for name in placed:
            world.run(name)
            awards.append((name, tuple(sorted(world.holdings(name)))))
            ends_s[name] = now_s + runtimes_s[name]
        if not placed:
            ended = min(ends_s, key=ends_s.__getitem__)
            now_s = ends_s.pop(ended)
            world.release(ended, Phase.SUCCEEDED)
    return awards


def _simulated(live: LiveSnapshot) -> list[Award]:
    settings = SimulationSettings(
        provisioning_p50_s=0, tick_spacing_s=0.001, min_runtime_s=PROTECTED_S, reserve_after_s=inf, w_fair=0
    )
    return _continued(live_scenario(live, settings, seed=0), "awarded")


@pytest.mark.parametrize("seed", few(range(3), 1))
def test_a_recorded_run_has_the_order_of_its_simulation(world: World, seed: int) -> None:
    """From the snapshot of a queue, the simulator awards the same workloads the same machines in the same order."""
    world.configure(min_runtime_s=PROTECTED_S, w_fair=0.0)
    runtimes_s = _fill(world, seed)
    live = get_snapshot(cast(Any, SimpleNamespace(engine=world.engine)), cast(Any, None))
    recorded = _recorded(world, runtimes_s)
    assert len(recorded) == len(runtimes_s)
    assert [name for name, _ in recorded] != sorted(runtimes_s)
    assert _simulated(live) == recorded


def _restarted(world: World, chance: random.Random) -> list[str]:
    """Runs elastic workloads, some of them in a second attempt, and adds machines; returns their ids."""
    names = []
    for _ in range(5):
        tasks = chance.randint(1, 2)
        names.append(
            world.submit(
                job(tasks=tasks, most_tasks=tasks + chance.choice([1, 3, 9])), tenant=chance.choice(["rich", "poor"]),
                limits=LimitsSpec(max_runtime_s=chance.choice([None, 7200, 40_000])),
            )
        )  # fmt: skip
    for ran_s, again in ((chance.choice([905.0, 6005.0]), True), (605.0, False)):
        world.tick()
        for name in names:
            if world.holdings(name) and world.workload(name).phase == Phase.PLACING:
                world.run(name, ran_s)
                world.saved(name, 5.0)
                if again and chance.random() < 0.7:
                    world.change(name, Phase.CHECKPOINTING)
                    world.release(name, Phase.PREEMPTED)
    for region in ("east", "west"):
        world.machine(f"{region}/c/m1", chance.randint(2, 6))
    return names


@pytest.mark.parametrize("seed", few(range(40), 4))
def test_elastic_workloads_grow_as_simulated(world: World, seed: int) -> None:
    """After machines have joined, the same workloads grow live and in the simulation, on the same machines.

    The runtime of earlier attempts counts in both.
    """
    world.configure(w_fair=0.0)
    chance = random.Random(seed)
    world.tenant("rich", level=2, gpus=1000)
    world.tenant("poor", level=4, gpus=6)
    for region in ("east", "west"):
        world.region(region)
        world.machine(f"{region}/c/m0", chance.randint(3, 5))
    names = _restarted(world, chance)
    live = get_snapshot(cast(Any, SimpleNamespace(engine=world.engine)), cast(Any, None))
    world.tick()
    recorded = []
    for name in names:
        if world.mail(name, "preempt"):
            world.change(name, Phase.CHECKPOINTING)
            world.release(name, Phase.PREEMPTED, code=ReasonCode.RESIZED)
            recorded.append((name, tuple(sorted(world.holdings(name)))))
    settings = SimulationSettings(
        provisioning_p50_s=0, tick_spacing_s=100, min_runtime_s=0, reserve_after_s=inf, w_fair=0,
        checkpoint_interval_s=300, eviction_s=1,
    )  # fmt: skip
    # The simulation has one pass within this time, too.
    assert _continued(replace(live_scenario(live, settings, seed=0), until_s=30.0), "moved") == recorded


def _damaged(live: LiveSnapshot, machine: str, min_runtime_s: float) -> list[Award]:
    """Returns where gangs continue in the simulation after a machine was lost that they used."""
    settings = SimulationSettings(
        provisioning_p50_s=0, tick_spacing_s=0.001, min_runtime_s=min_runtime_s, reserve_after_s=inf, w_fair=0
    )
    scene = losing(live_scenario(live, settings, seed=0), (1.0, machine.partition("/")[0], machine))
    return _continued(replace(scene, until_s=90.0), "repaired")


def _continued(scene: Scenario, what: str) -> list[Award]:
    """Returns the places where workloads of a simulation continue by a kind of event."""
    seen: list[Happened] = []
    Run(scene, POLICIES["global"], follow=seen.append).go()
    jobs = [(one.workload, cast(Any, one.detail[0])) for one in seen if one.what == what]
    return [(name, tuple(sorted(machine for placed in found for machine, _ in placed))) for name, found in jobs]


@pytest.mark.parametrize("seed", few(range(12), 4))
def test_victims_shrink_as_simulated(world: World, seed: int) -> None:
    """Elastic workloads that are evicted keep the same machines live and in the simulation, or wait in both."""
    world.configure(w_fair=0.0, shrink=True)
    chance = random.Random(seed)
    world.tenant("rich", level=2, gpus=1000)
    world.tenant("poor", level=4, gpus=4)
    for region in ("east", "west"):
        world.region(region)
        for n in range(3):
            world.machine(f"{region}/c/m{n}", chance.randint(2, 5))
    victims = [
        world.running(job(tasks=tasks, most_tasks=tasks + chance.choice([2, 9])), tenant="poor")
        for tasks in (chance.randint(1, 3) for _ in range(3))
    ]
    for _ in range(chance.randint(1, 3)):
        world.submit(job(gpus=chance.randint(1, 4), tasks=chance.randint(1, 2)), tenant="rich")
    world.submit(job(gpus=chance.randint(1, 3)), tenant="poor")
    live = get_snapshot(cast(Any, SimpleNamespace(engine=world.engine)), cast(Any, None))
    world.tick()
    recorded = []
    for name in victims:
        if world.attempt(name).evictor:
            world.change(name, Phase.CHECKPOINTING)
            world.release(name, Phase.PREEMPTED)
            if world.workload(name).attempt == 2:
                recorded.append((name, tuple(sorted(world.holdings(name)))))
    settings = SimulationSettings(
        provisioning_p50_s=0, tick_spacing_s=100, min_runtime_s=0, reserve_after_s=inf, w_fair=0, eviction_s=1,
        grow=False, shrink=True,
    )  # fmt: skip
    assert sorted(_continued(replace(live_scenario(live, settings, seed=0), until_s=30.0), "shrunk")) == sorted(
        recorded
    )


@pytest.mark.parametrize("seed", few(range(24), 6))
def test_a_loss_is_repaired_as_simulated(world: World, seed: int) -> None:
    """The gangs that lose a machine continue live on the machines that the simulation says, or wait as it says."""
    chance = random.Random(seed)
    min_runtime_s = chance.choice([0.0, PROTECTED_S])
    world.configure(min_runtime_s=min_runtime_s, w_fair=0.0, repair=True)
    world.tenant("rich", level=2, gpus=1000)
    world.tenant("poor", level=4, gpus=3)
    for region in ("east", "west"):
        world.region(region)
        for n in range(6 if min_runtime_s else 4):
            world.machine(f"{region}/c/m{n}", 2, rack=f"k{n % 2}")
    names = [
        world.submit(
            job(tasks=chance.randint(1, 4), gpus=chance.choice([1, 2])), tenant=chance.choice(["rich", "poor"])
        )
        for _ in range(5)
    ]
    if not min_runtime_s:  # A full fleet, on which the rich may evict the poor.
        names += [world.submit(job(gpus=2), tenant="poor") for _ in range(8)]
    live = get_snapshot(cast(Any, SimpleNamespace(engine=world.engine)), cast(Any, None))
    world.tick()
    placed = {name: sorted(world.holdings(name)) for name in names if world.holdings(name)}
    lost = chance.choice([m for used in placed.values() if len(used) > 1 for m in used])
    for name in placed:
        world.run(name)
    world.machines.lost(world.attend(lost))
    for name, used in sorted(placed.items()):
        if lost in used:
            world.release(name, Phase.PENDING, blames=lost, silent=[lost])
    recorded = [
        (name, tuple(sorted(world.holdings(name)))) for name in sorted(placed) if world.workload(name).attempt == 2
    ]
    assert _damaged(live, lost, min_runtime_s) == recorded
