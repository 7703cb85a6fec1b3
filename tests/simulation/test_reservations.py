"""A gang within quota that nothing more important displaces starts within a known time, whatever small work comes.

MIZZEN_RESERVE_ROUNDS is the number of random queues; `make properties` tries a hundred.
"""

import os
import random
from dataclasses import replace
from math import inf

import pytest

from domain.scheduling import MachineState
from simulation.workloads import Workload
from tests.simulation.worlds import SURE, happenings, machines, scenario, when, workload

ROUNDS = int(os.environ.get("MIZZEN_RESERVE_ROUNDS", "6"))
ENDS_S = 27_000.0


@pytest.mark.parametrize("known", [True, False])
def test_a_gang_starts_once_what_ran_when_it_reserved_has_ended(known: bool) -> None:
    """Within `reserve_after_s`, the longest of what ran then still runs, and a scan; also where ends are only guessed.

    Guesses change from pass to pass, and with them where it could start first. Older work comes before it: the region's
    reservation is the gang's once none of it waits any more.
    """
    reserve_after_s, scan_s = SURE.reserve_after_s, SURE.full_scan_s
    waited = 0
    for seed in range(ROUNDS):
        states, small, gang = _stream(seed, known)
        seen = happenings(scenario(states, [*small, gang], until_s=ENDS_S))[1]
        awarded, finished = when(seen, "awarded"), when(seen, "finished")
        before_s = max((awarded.get(w.id, inf) for w in small if w.submit_s < gang.submit_s), default=0.0)
        reserves_s = max(gang.submit_s + reserve_after_s, before_s)
        still_s = [
            awarded[w.id] + (w.max_runtime_s if known else w.duration_s) - reserves_s
            for w in small
            if awarded.get(w.id, inf) <= reserves_s < finished.get(w.id, inf)
        ]
        assert awarded.get("gang", inf) <= reserves_s + max(still_s, default=0.0) + scan_s, f"seed {seed}"
        waited += awarded["gang"] - gang.submit_s > reserve_after_s
    assert waited > ROUNDS // 3


def _stream(seed: int, known: bool) -> tuple[list[MachineState], list[Workload], Workload]:
    """One to three regions, small work that asks for more than they have, and one gang of whole machines."""
    chance = random.Random(seed)
    count = chance.randint(2, 4)
    states = [m for region in ("east", "north", "west")[: chance.randint(1, 3)] for m in machines(region, count)]
    small: list[Workload] = []
    at_s = 0.0
    while at_s < ENDS_S:
        duration_s, gpus = chance.choice((600, 1800, 3600, 7200)), chance.choice((1, 1, 2, 4))
        one = workload(f"small{len(small):04d}", gpus, at_s, duration_s)
        small.append(replace(one, max_runtime_s=duration_s * chance.choice((1.0, 1.5)) if known else inf))
        at_s += duration_s * gpus / (8 * len(states)) * chance.uniform(0.5, 1.1)
    return states, small, workload("gang", 8, chance.uniform(3000, 9000), 1000, tasks=chance.randint(2, count))
