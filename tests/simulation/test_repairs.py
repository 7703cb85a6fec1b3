"""Repair in place in the simulator: where a gang continues after the loss of a machine, and what work it has lost."""

import random

import pytest

from domain.scheduling import MachineState
from simulation.run import Scenario
from tests.simulation.scenarios import happenings, losing, machines, scenario, tenant, when, workload

POOR = [tenant("poor", a100=0)]


def damaged(spares: int) -> tuple[Scenario, list[MachineState]]:
    """Two machines with a gang of two tasks, spares, and an older workload that waits for all machines."""
    fleet = machines("east", 2 + spares)
    work = [
        workload("gang", 8, duration_s=10_000, tenant="poor", tasks=2),
        workload("wide", 8, submit_s=1, duration_s=100, tenant="poor", tasks=2 + spares),
    ]
    return scenario(fleet, work, POOR), fleet


@pytest.mark.parametrize("spares", [0, 1])
def test_a_gang_continues_where_it_is(spares: int) -> None:
    """With a spare, it starts again when its tasks have stopped; it has lost the 50 s since its last checkpoint."""
    scene, fleet = damaged(spares)
    run, seen = happenings(losing(scene, (1050.0, "east", fleet[0].id)))
    if spares:
        assert when(seen, "repaired") == when(seen, "started") == {"gang": 1060}
        (found,) = [one.detail for one in seen if one.what == "repaired"]
        assert found[0] == (((fleet[1].id, 1), (fleet[2].id, 1)),)
        assert when(seen, "finished")["gang"] == 1060 + 10_000 - 1000
        assert run.meter.total.lost_gpu_s["work"] == 50 * 16
    else:
        assert when(seen, "repaired") == {} and "gang" not in when(seen, "finished")


@pytest.mark.parametrize("level", [1, 6])
def test_a_victim_makes_room(level: int) -> None:
    """Without a spare, a within-quota gang evicts over-quota work beside its other task, and starts when it has left.

    It does not evict work of its own rank.
    """
    fleet = machines("east", 3)
    work = [
        workload("gang", 8, duration_s=10_000, tenant="rich", tasks=2, level=level),
        workload("small", 8, submit_s=1, duration_s=100_000, tenant="poor" if level == 1 else "rich", level=6),
    ]
    scene = losing(scenario(fleet, work, [*POOR, tenant("rich", a100=24)]), (1050.0, "east", fleet[0].id))
    _, seen = happenings(scene)
    if level == 1:
        assert when(seen, "repaired") == {"gang": 1060} and when(seen, "evicted") == {"small": 1060}
        (found,) = [one.detail for one in seen if one.what == "repaired"]
        assert found == ((((fleet[1].id, 1), (fleet[2].id, 1)),), ("00000001",))
        assert when(seen, "left")["small"] == when(seen, "started")["gang"] == 1070
        assert when(seen, "finished")["gang"] == 1070 + 10_000 - 1000
    else:
        assert when(seen, "repaired") == when(seen, "evicted") == {} and when(seen, "left")["gang"] == 1060


def test_off_returns_to_the_queue() -> None:
    """Without the rule, the same gang is queued, and is awarded by the next pass."""
    scene, fleet = damaged(1)
    _, seen = happenings(losing(scene, (1050.0, "east", fleet[0].id), repair=False))
    assert when(seen, "repaired") == {} and when(seen, "left")["gang"] == 1060


def test_random_histories_lose_no_work() -> None:
    """On random scenarios in which machines are lost, no machine is overbooked, and all that can finish does."""
    repaired, evicted = 0, 0
    for seed in range(6):
        chance = random.Random(seed)
        fleet = machines("east", 8)
        work = [
            workload(
                f"w{k}", chance.choice((2, 4, 8)), chance.randint(0, 4000), chance.choice((600, 3000)),
                chance.choice((1, 5)), chance.choice(("nlp", "poor")), tasks=chance.choice((1, 2, 3)),
            )
            for k in range(40)
        ]  # fmt: skip
        scene = scenario(fleet, work, [*POOR, tenant("nlp", a100=30)], seed=seed)
        losses = [(500.0 + 900 * k, "east", one.id) for k, one in enumerate(chance.sample(fleet, 4))]
        _, without = happenings(losing(scene, *losses, repair=False))
        _, seen = happenings(losing(scene, *losses))
        assert when(seen, "finished").keys() == when(without, "finished").keys() == {w.id for w in work}
        victims = [len(one.detail[1]) for one in seen if one.what == "repaired"]
        repaired, evicted = repaired + len(victims), evicted + sum(victims)
    assert repaired > evicted > 0
