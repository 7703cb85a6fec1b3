"""Tests of transformers and lightning with two processes, of which one is killed or signalled."""

import signal
from pathlib import Path

import lightning  # noqa: F401  # Imported before the forks.
import pytest
import transformers  # noqa: F401

from mizzen.checkpoint import list_committed
from tests_integrations.pages import SCRIPTS
from tests_integrations.scripts import Signal, run_gang

CHANGES = {
    "transformers": ('report_to="none",', 'report_to="none", use_cpu=True, ddp_backend="gloo",'),
    "lightning": (
        "lightning.Trainer(",
        'lightning.Trainer(strategy="ddp", accelerator="cpu", devices=2, use_distributed_sampler=False, ',
    ),
}
RESULT = {"transformers": "final/model.safetensors", "lightning": "model.pt"}


@pytest.mark.parametrize("name", CHANGES)
def test_both_ranks_save_and_leave_together(name: str, tmp_path: Path) -> None:
    """Rank 1 is killed and later gets SIGTERM. Both ranks save the same step, and the final weights do not change."""
    before, after = CHANGES[name]
    script = tmp_path / "script.py"
    assert before in SCRIPTS["after", name]
    script.write_text(SCRIPTS["after", name].replace(before, after))

    def go(root: str, interval_s: str, told: Signal | None = None) -> list[int]:
        variables = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / root), "MIZZEN_CHECKPOINT_INTERVAL_S": interval_s}
        ended = run_gang(script, tmp_path, {1: told} if told else None, MIZZEN_PLATFORM="sigterm", **variables)
        assert all(rank.code != 1 for rank in ended) or told, ended[0].output + ended[1].output
        return [rank.code for rank in ended]

    assert go("whole", "3600") == [0, 0]
    expected = (tmp_path / RESULT[name]).read_bytes()
    assert go("cut", "0", Signal(signal.SIGKILL, 3))[1] == -signal.SIGKILL
    assert list_committed(tmp_path / "cut")[0].step == 2
    assert go("cut", "3600", Signal(signal.SIGTERM, 2)) == [143, 143]
    assert list_committed(tmp_path / "cut")[0].step == 4
    assert go("cut", "3600") == [0, 0]
    assert (tmp_path / RESULT[name]).read_bytes() == expected
