"""The fleet of the Philly experiment matches its README."""

from pathlib import Path

import pytest

from domain.scheduling import JobRequest
from research.traces.fleet import load_simulated_fleet
from research.traces.rows import tasks_of
from simulation.hardware import Hardware, supply

GIB = 1 << 30
GANGS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
"""All gang sizes of the trace, in GPUs."""


def test_every_gang_fits_in_two_regions_at_least(checkout: Path) -> None:
    """On each GPU type, every gang fits in at least two regions; all regions have different machines."""
    states = load_simulated_fleet(checkout / "examples/philly/fleet.yaml").states()
    hardware = Hardware(states)
    assert len(states) == 5
    for gpu_type in hardware.supply:
        for gpus in GANGS:
            tasks, each = tasks_of(gpus, 8)
            job = JobRequest("main", tasks, each, (gpu_type,), 4000 * each, 32 * GIB * each)
            assert len(hardware.regions_for(job)) >= 2, (gpu_type, gpus)
    shapes = {tuple(supply({region: machines}).items()) for region, machines in states.items()}
    assert len(shapes) == 5


@pytest.mark.parametrize("gpus", GANGS)
def test_tasks_are_of_one_size_and_fill_machines(gpus: int) -> None:
    """A gang of n GPUs gets exactly n GPUs, in equal tasks on as few machines as possible."""
    tasks, each = tasks_of(gpus, 8)
    assert tasks * each == gpus and tasks == -(-gpus // 8)
