"""What the callback for transformers does to the Trainer's output folder."""

from pathlib import Path

import transformers  # noqa: F401  # Imported before the forks.

from mizzen.checkpoint import list_committed
from tests_integrations.pages import SCRIPTS, script
from tests_integrations.scripts import run


def test_its_folders_go_and_others_stay(tmp_path: Path) -> None:
    """What it had the Trainer write is gone, also what a killed process left; the Trainer's own checkpoints stay."""
    left = tmp_path / "out" / "checkpoint-99"
    left.mkdir(parents=True)
    (left / ".mizzen").touch()
    path = script("after", "transformers", tmp_path)
    own = 'save_strategy="steps", save_steps=9'
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', own))
    told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    ended = run(path, tmp_path, **told)
    assert ended.code == 0, ended.output
    assert list_committed(tmp_path / "ckpt")[0].step == 18
    # Steps 9 and 18 were saved for both.
    assert sorted(folder.name for folder in (tmp_path / "out").glob("checkpoint-*")) == [
        "checkpoint-18",
        "checkpoint-9",
    ]


def test_a_model_alone_is_refused(tmp_path: Path) -> None:
    """Where the Trainer would save the model only, the training does not begin."""
    path = script("after", "transformers", tmp_path)
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', "save_only_model=True"))
    ended = run(path, tmp_path, MIZZEN_CHECKPOINT_URI=str(tmp_path / "ckpt"))
    assert ended.code == 1
    assert "ValueError: save_only_model=True: a training cannot go on from the model alone" in ended.output
