"""`Checkpointer(best=...)`: the best checkpoints stay, in addition to the newest."""

from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import Checkpointer, list_committed

LOSSES = (5.0, 1.0, 3.0, 2.0, float("nan"), 4.0, None, 6.0)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("best", "kept"), [(("loss", 2), [8, 4, 2]), (("loss", 2, "max"), [8, 1]), (("other", 2), [8]), (None, [8])]
)
def test_the_best_stay(tmp_path: Path, best: Any, kept: list[int], background: bool) -> None:
    """Those with the least or greatest value at their save stay; nan and a missing value are never the best."""
    with Checkpointer(tmp_path, keep=1, best=best, interval_s=0, background=background) as checkpointer:
        checkpointer.track(model={"w": 1})
        for step in range(checkpointer.restore() + 1, len(LOSSES) + 1):
            checkpointer.progress["loss"] = LOSSES[step - 1]
            checkpointer.step(step)
            checkpointer.progress["loss"] = -1.0 if best and len(best) == 2 else 9.0  # Not the value at the save.
            checkpointer.wait()
    assert [manifest.step for manifest in list_committed(tmp_path, verify=True)] == kept


def test_the_best_survive_a_restart(tmp_path: Path) -> None:
    """The values are in the log, so a new process compares with earlier checkpoints; of equal ones, the newer stays."""
    for attempt, losses in ((1, (2.0, 1.0, 3.0)), (2, (1.0, 4.0, 5.0))):
        checkpointer = Checkpointer(tmp_path, attempt=attempt, keep=1, best=("loss", 1))
        for step, loss in enumerate(losses, start=10 * attempt):
            checkpointer.save(step, {"progress": {"loss": loss}})
    assert [manifest.step for manifest in list_committed(tmp_path)] == [22, 20]


@pytest.mark.parametrize("best", [("loss", 0), ("loss",), "loss", (3, "loss"), ("loss", 2, "least"), ("loss", True)])
def test_a_wrong_argument_is_refused(tmp_path: Path, best: Any) -> None:
    """The error names the argument, and nothing is created."""
    with pytest.raises(ValueError, match="best="):
        Checkpointer(tmp_path / "root", best=best)
    assert not (tmp_path / "root").exists()
