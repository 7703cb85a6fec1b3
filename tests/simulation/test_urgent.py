"""Short work of worse rank does not keep a gang within quota out: it is awarded within a known time.

The bound is the minimum runtime that protects the short work, one eviction that may be under way, and one pass.
MIZZEN_URGENT_ROUNDS is the number of random streams; `make properties` runs a hundred.
"""

import os
import random
from dataclasses import replace
from math import inf

import pytest

from domain.scheduling import MachineState
from simulation.settings import SimulationSettings
from simulation.workloads import SimulatedWorkload
from tests.simulation.scenarios import happenings, machines, scenario, tenant, when, workload

ROUNDS = int(os.environ.get("MIZZEN_URGENT_ROUNDS", "1"))
LIVE = SimulationSettings()
"""The shipped settings: workloads are protected by their minimum runtime, and take minutes to start."""
BOUND_S = LIVE.min_runtime_s + LIVE.eviction_s + LIVE.tick_spacing_s
TENANTS = [tenant("hi", a100=1000), tenant("middle", level=5, a100=1000), tenant("lo", level=7)]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_short_work_over_quota_does_not_keep_an_urgent_gang_out(seed: int) -> None:
    """In streams of short workloads that exceed the supply, each gang is awarded within the bound.

    Gangs arrive at all phases of the stream. The next gang arrives when the one before has ended.
    """
    states, small, gangs = _stream(seed)
    seen = happenings(scenario(states, [*small, *gangs], TENANTS, LIVE, until_s=gangs[-1].submit_s + 3600))[1]
    awarded = when(seen, "awarded")
    waits_s = [awarded.get(gang.id, inf) - gang.submit_s for gang in gangs]
    assert max(waits_s) <= BOUND_S, waits_s


def test_two_gangs_that_need_different_machines_both_reserve() -> None:
    """A second gang does not wait until the first one is placed: it reserves other machines in the same pass."""
    small = [workload(f"s{k:04d}", 1, 5.0 * k, 60.0, level=7, tenant="lo") for k in range(800)]
    gangs = [workload(f"gang{k}", 8, 2000.0, 600.0, level=1, tenant="hi") for k in range(2)]
    seen = happenings(scenario(machines("east", 2), [*small, *gangs], TENANTS, LIVE, until_s=4000.0))[1]
    awarded = when(seen, "awarded")
    assert max(awarded[gang.id] - gang.submit_s for gang in gangs) <= BOUND_S


def test_work_of_its_own_rank_is_not_kept_out_before_the_gang_has_waited_long() -> None:
    """What a gang reserves against worse ranks may still be used by work of its own rank."""
    small = [workload(f"s{k:04d}", 1, 5.0 * k, 60.0, level=7, tenant="lo") for k in range(800)]
    gang = workload("gang", 8, 2000.0, 600.0, level=1, tenant="hi")
    other = workload("other", 1, 2001.0, 600.0, level=1, tenant="hi")
    seen = happenings(scenario(machines("east", 1), [*small, gang, other], TENANTS, LIVE, until_s=4000.0))[1]
    awarded = when(seen, "awarded")
    assert awarded["other"] < awarded["gang"]


def _stream(seed: int) -> tuple[list[MachineState], list[SimulatedWorkload], list[SimulatedWorkload]]:
    """Returns one to three regions, a stream of short workloads of worse rank, and two gangs of whole machines.

    Half of the streams have workloads of several ranks, which evict each other, and half have maximum runtimes.
    """
    chance = random.Random(seed)
    mixed, known = seed % 2 == 1, (seed + 1) // 2 % 2 == 1
    count = chance.randint(1, 3)
    states = [m for region in ("east", "north", "west")[: chance.randint(1, 3)] for m in machines(region, count)]
    ends_s = 2 * 1500.0 + 2000.0
    median_s = chance.choice((10.0, 30.0, 60.0, 90.0, 200.0, 300.0))
    small: list[SimulatedWorkload] = []
    at_s = 0.0
    while at_s < ends_s:
        duration_s = min(300.0, max(10.0, chance.lognormvariate(0, 0.7) * median_s))
        level, name = chance.choice(((7, "lo"), (7, "lo"), (5, "middle"))) if mixed else (7, "lo")
        one = workload(f"s{len(small):05d}", chance.choice((1, 1, 2)), at_s, duration_s, level, name)
        small.append(replace(one, max_runtime_s=duration_s + 500 if known else inf))
        # Provisioning holds the slots, too, about 150 s.
        at_s += (duration_s + 150) * 1.33 / (8 * len(states)) * chance.uniform(0.5, 1.1)
    gangs = [
        workload(
            f"gang{k:02d}",
            8,
            1000.0 + 1500 * k + chance.uniform(0, 500),
            200.0,
            1,
            "hi",
            tasks=chance.randint(1, count),
        )
        for k in range(2)
    ]
    return states, small, gangs
