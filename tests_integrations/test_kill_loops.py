"""Each training of the kill loops, killed once; `make kill-loops` kills each twenty times."""

from pathlib import Path

import pytest

from tests_integrations.kill_loops import TRAININGS, kill_loop


@pytest.mark.parametrize("name", TRAININGS)
def test_killed_once_it_ends_as_without(name: str, tmp_path: Path) -> None:
    """Losses, evaluations, and all weights and moments, byte by byte."""
    outcome = kill_loop(name, 1, 1, tmp_path)
    assert outcome.kills.total() == 1
    assert outcome.differs == []
