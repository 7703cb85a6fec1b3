"""Machines from providers on a whole stack: real agents, a simulated cloud, and EC2 behind moto."""

from pathlib import Path

import pytest

from rigs.demos.bursting import Bursting, installation
from tests.stack.harness import processes_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]


@pytest.mark.long
def test_gangs_burst_into_clouds_and_nothing_is_left(tmp_path: Path) -> None:
    """Pools grow, a spot zone reclaims machines with notice, gangs move, pools shrink, as in `make demo-bursting`."""
    with installation(tmp_path) as (up, region):
        up.start()
        Bursting(up, region, print).tell()
        assert up.interrupt() == 0
        assert processes_of(up.data) == {}
