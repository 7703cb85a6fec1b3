"""Kills each training of the kill loops once. `make kill-loops` kills each twenty times."""

import signal
from pathlib import Path

import pytest

from tests_integrations.kill_loops import FOLDER, TRAININGS, kill_loop, results
from tests_integrations.scripts import Signal, run


@pytest.mark.parametrize("name", TRAININGS)
def test_killed_once_it_ends_as_without(name: str, tmp_path: Path) -> None:
    """A training that is killed once ends with the same losses, evaluations, weights and moments, byte for byte."""
    outcome = kill_loop(name, 1, 1, tmp_path)
    assert outcome.kills.total() == 1
    assert outcome.differs == []


def test_averaging_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Weight averaging resumes within an epoch, although Lightning skips the hook that sets its schedule."""
    script, told = FOLDER / "lightning_swa.py", {"MIZZEN_CHECKPOINT_URI": "ckpt", "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    assert run(script, tmp_path / "whole", **told).code == 0
    # An epoch has four steps, and averaging begins with the second one.
    for steps in (7, 4, 4):
        assert run(script, tmp_path / "killed", Signal(signal.SIGKILL, steps), **told).code == -signal.SIGKILL
    assert run(script, tmp_path / "killed", **told).code == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
