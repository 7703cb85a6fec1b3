"""Moves in the simulator: the gang that waits gets the machine, the work continues, and the limit holds."""

import random
from dataclasses import replace
from math import inf

from simulation.policies import POLICIES
from simulation.run import Run, Scenario
from simulation.transitions import Happened
from tests.simulation.scenarios import SURE, elastic, happenings, machines, scenario, tenant, when, workload

POOR = [tenant("poor", a100=0)]


def pieces(moves_per_h: int) -> Scenario:
    """Two machines, on each of which two of eight GPUs are used from 2,000 s on, and a gang that comes at 3,000 s."""
    work = [
        *(workload(f"filler{k}", 6, duration_s=2000, tenant="poor") for k in range(2)),
        workload("a", 2, submit_s=1, duration_s=20_000, tenant="poor"),
        workload("b", 2, submit_s=2, duration_s=20_000, tenant="poor"),
        workload("gang", 8, submit_s=3000, duration_s=100, tenant="poor"),
    ]
    return scenario(machines("east", 2), work, POOR, SURE.model_copy(update={"moves_per_h": moves_per_h}))


def test_a_gang_starts_on_the_machine_that_a_workload_leaves() -> None:
    """The workload that loses less leaves within its grace period and continues beside the other with all its work."""
    run, seen = happenings(pieces(1))
    assert when(seen, "moving") == {"b": 3000} and when(seen, "moved") == {"b": 3010}
    assert when(seen, "awarded")["gang"] == 3010
    assert when(seen, "finished")["b"] == 20_012 and when(seen, "finished")["a"] == 20_001
    total = run.meter.total
    assert (total.moves, total.preemptions, dict(total.lost_gpu_s)) == (
        1, 0, {"work": 0.0, "eviction": 20.0, "restart": 0.0},
    )  # fmt: skip


def test_off_by_default() -> None:
    """Without moves, the gang waits until one of the workloads has finished."""
    assert SURE.moves_per_h == 0
    _, seen = happenings(pieces(0))
    assert when(seen, "moving") == {} and when(seen, "awarded")["gang"] == 20_001


def test_a_workload_whose_new_machine_ends_is_queued() -> None:
    """If the booked machine closes before the workload has left its old one, the workload waits in the queue."""
    seen: list[Happened] = []

    def follow(event: Happened) -> None:
        seen.append(event)
        if event.what == "moving":
            transitions = run.simulator.transitions
            booking = transitions.states[3].booking
            assert booking is not None
            transitions.interrupt(event.at_s, "east", booking[0].jobs[0].machines[0][0])

    run = Run(pieces(1), POLICIES["global"], follow=follow)
    run.go()
    assert when(seen, "moved") == {} and when(seen, "left")["b"] == 3010
    for ledger in run.simulator.transitions.ledgers.values():
        ledger.check()


def _random_pieces(seed: int) -> Scenario:
    """Returns small workloads that end at different times, mostly over-quota, and gangs that need whole machines."""
    chance = random.Random(seed)
    work = []
    for k in range(150):
        gpus = chance.choice((1, 1, 2, 3, 8))
        submit_s = chance.randint(0, 40_000)
        duration_s, name = chance.choice((600, 3000, 20_000)), chance.choice(("poor", "poor", "rich"))
        places = frozenset({chance.choice(("east", "west"))}) if chance.random() < 0.3 else None
        one = workload(f"w{k}", gpus, submit_s, duration_s, chance.randint(1, 7), name, regions=places)
        if chance.random() < 0.1:
            one = elastic(one, gpus + chance.choice((1, 7)))
        work.append(replace(one, max_runtime_s=inf))
    fleet = [*machines("east", 4), *machines("east", 2, cluster="c2"), *machines("west", 3)]
    return scenario(fleet, work, [*POOR, tenant("rich", a100=16)], seed=seed)


def test_random_histories_keep_the_limit_and_lose_nothing() -> None:
    """On random scenarios, no machine is overbooked, all work finishes, and no hour has more moves than allowed."""
    moved = 0
    for seed in range(6):
        scene = _random_pieces(seed)
        _, seen = happenings(replace(scene, settings=SURE.model_copy(update={"moves_per_h": 2})))
        times = [one.at_s for one in seen if one.what == "moving"]
        assert all(sum(at_s - 3600 < one <= at_s for one in times) <= 2 for at_s in times)
        assert len(when(seen, "finished")) == len(scene.workloads)
        moved += len(times)
    assert moved > 5
