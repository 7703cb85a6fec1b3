"""A short chaos test: a quarter of a minute of faults on a real stack. `make chaos` runs the long form."""

import os
from pathlib import Path

import pytest

from tests.chaos.run import run_seed
from tests.chaos.schedule import draw_schedule

SEED = int(os.environ.get("MIZZEN_CHAOS_SEED", "16143"))
"""Chosen for its mix of faults and requests, all of which are over after 18 s.

It has fifteen kinds of faults, failing award transactions and full disks among them, repeated submissions and
cancellations. With most seeds a part is still stopped after 40 s.
"""
_FAULTS_S, _FAULT_EVERY_S, _SUBMIT_EVERY_S = 16.0, 1.3, 1.7


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_quarter_of_a_minute_of_faults_breaks_no_promise(tmp_path: Path) -> None:
    """Random kills, stops and losses with impatient users cause no violation."""
    schedule = draw_schedule(SEED, _FAULTS_S, _FAULT_EVERY_S, _SUBMIT_EVERY_S)
    told: list[str] = []
    outcome = run_seed(SEED, schedule, tmp_path / "run", told.append)
    assert outcome.violations == (), told
    assert outcome.faults.total() >= len(schedule.faults) // 2, told
    assert outcome.workloads >= len(schedule.submissions) // 2, told
    assert any(phase == "succeeded" for phase in outcome.observed.phases.values()), told
    # Without acknowledged ids and cancellations, the checks `lost`, `finished-again` and `cancel-ignored` would be
    # vacuous. A workload may have finished before its cancellation arrives, so that is not required to succeed.
    acknowledged = [order for order in outcome.observed.orders if order.ids]
    assert len(acknowledged) >= len(schedule.submissions) // 2, told
    assert any(order.cancel_sent_s is not None for order in acknowledged), told
