"""A short run of chaos: half a minute of faults on a real stack, without a violation (`make chaos`: the long one)."""

import os
from pathlib import Path

import pytest

from tests.chaos.run import run_seed
from tests.chaos.schedule import draw_schedule

SEED = int(os.environ.get("MIZZEN_CHAOS_SEED", "596"))
"""Chosen: fifteen kinds of faults, the last of which is over after 27 s; gangs of eight, one that fails, repeated
submissions, evictions, storms of cancellations. With most seeds some part is still stopped after 50 s.
"""
_FAULTS_S, _FAULT_EVERY_S, _SUBMIT_EVERY_S = 24.0, 2.0, 1.7


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_half_a_minute_of_faults_breaks_no_promise(tmp_path: Path) -> None:
    """Random kills, stops and losses beside impatient users; judged by what the tasks wrote."""
    schedule = draw_schedule(SEED, _FAULTS_S, _FAULT_EVERY_S, _SUBMIT_EVERY_S)
    told: list[str] = []
    outcome = run_seed(SEED, schedule, tmp_path / "run", told.append)
    assert outcome.violations == (), told
    assert outcome.faults.total() >= len(schedule.faults) // 2, told
    assert outcome.workloads >= len(schedule.submissions) // 2, told
    assert any(phase == "succeeded" for phase in outcome.observed.phases.values()), told
    # Judged by what users were told: without ids nothing would be lost, finished again or cancelled in vain.
    acknowledged = [order for order in outcome.observed.orders if order.ids]
    assert len(acknowledged) >= len(schedule.submissions) // 2, told
    assert any(order.cancelled_s is not None for order in acknowledged), told
