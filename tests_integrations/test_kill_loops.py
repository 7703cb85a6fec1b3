"""Kills each training of the kill loops once. `make kill-loops` kills each twenty times.

Of the trainings in `exact`, a tenth is killed twenty times: each day another one.
"""

import datetime
import signal
from pathlib import Path

import pytest

from tests_integrations.kill_loops import EXACT, FOLDER, TRAININGS, kill_loop, results
from tests_integrations.scripts import Aim, Signal, run

TODAY = datetime.datetime.now(datetime.UTC).toordinal() % 10


def test_there_are_eight_trainings_or_more_of_five_frameworks() -> None:
    """A tenth of them has unlike ones."""
    counts = {name.partition("_")[0]: 0 for name in EXACT}
    for name in EXACT:
        counts[name.partition("_")[0]] += 1
    assert counts.keys() >= {"ddp", "lightning", "numpy", "torch", "transformers"}
    assert all(count >= 8 for name, count in counts.items() if name not in ("jax", "sklearn"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", EXACT[TODAY::10])
def test_killed_again_and_again_it_is_exact(name: str, tmp_path: Path) -> None:
    """A training as people write it ends with the same bytes after 20 kills, and without a warning."""
    outcome = kill_loop(name, 20, TODAY, tmp_path)
    assert outcome.kills.total() == 20
    assert outcome.differs == []


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


def test_the_last_epoch_of_averaging_has_no_gradients(tmp_path: Path) -> None:
    """Killed before the epoch that only updates batch norms, a training ends as without: it has no old gradients."""
    script, told = FOLDER / "lightning_swa.py", {"MIZZEN_CHECKPOINT_URI": "ckpt", "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    assert run(script, tmp_path / "whole", **told).code == 0
    assert run(script, tmp_path / "killed", Aim("iterating", 6), **told).code == -signal.SIGKILL
    assert run(script, tmp_path / "killed", **told).code == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


@pytest.mark.parametrize("steps", [(3, 3, 3), (5, 5, 5)])
def test_what_follows_the_hooks_of_lightning_is_saved(steps: tuple[int, ...], tmp_path: Path) -> None:
    """A training killed right after validations within and at the end of epochs keeps what they have led to."""
    script = FOLDER / "lightning_monitors.py"
    told = {"MIZZEN_CHECKPOINT_URI": "ckpt", "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    assert run(script, tmp_path / "whole", **told).code == 0
    for at_step in steps:
        assert run(script, tmp_path / "killed", Signal(signal.SIGKILL, at_step), **told).code == -signal.SIGKILL
    assert run(script, tmp_path / "killed", **told).code == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
