"""What the callback for transformers does to the Trainer's output folder."""

import json
import signal
from pathlib import Path

import pytest
import transformers  # noqa: F401  # Imported before the forks.

from mizzen.checkpoint import list_committed
from mizzen.integrations.transformers import lacks
from tests_integrations.kill_loops import FOLDER as TRAININGS
from tests_integrations.pages import SCRIPTS, script
from tests_integrations.scripts import Signal, run


def test_its_folders_go_and_others_stay(tmp_path: Path) -> None:
    """What it had the Trainer write is gone, also what a killed process left; the Trainer's own checkpoints stay."""
    left = tmp_path / "out" / ".mizzen" / "checkpoint-99"
    left.mkdir(parents=True)
    path = script("after", "transformers", tmp_path)
    own = 'save_strategy="steps", save_steps=9'
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', own))
    told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    ended = run(path, tmp_path, **told)
    assert ended.code == 0, ended.output
    assert list_committed(tmp_path / "ckpt")[0].step == 18
    # Steps 9 and 18 were saved for both.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-18", "checkpoint-9"]


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_rotation_takes_nothing_that_is_not_stored(strategy: str, tmp_path: Path) -> None:
    """With one checkpoint to keep and an old one of a higher number, every save is stored whole, and loads."""
    old = tmp_path / "out" / "checkpoint-99999"
    old.mkdir(parents=True)
    (old / "of another run").touch()
    path = script("after", "transformers", tmp_path)
    limit = f'save_strategy="{strategy}", save_steps=1, save_total_limit=1'
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', limit))
    told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    ended = run(path, tmp_path, Signal(signal.SIGKILL, 5), **told)
    assert ended.code == -signal.SIGKILL
    [newest, *_] = list_committed(tmp_path / "ckpt", verify=True)
    assert newest.step == 4
    assert {"trainer_state.json", "model.safetensors", "optimizer.pt"} <= {
        part.name.split(".", 2)[2] for part in newest.parts if part.name.startswith("file.")
    }
    ended = run(path, tmp_path, **told)
    assert ended.code == 0, ended.output
    assert "Warning" not in ended.output
    assert list_committed(tmp_path / "ckpt", verify=True)[0].step == 18


def test_the_best_model_comes_along(tmp_path: Path) -> None:
    """On another machine, where the output folder is empty, the Trainer loads the best model of before at its end."""
    script = TRAININGS / "trainer.py"
    told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    whole = tmp_path / "whole"
    assert run(script, whole, **(told | {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "other")})).code == 0
    _, best, *_ = expected = json.loads((whole / "result.json").read_text())
    first = int(best.rpartition("-")[2])
    # The first machine is gone after the best model was found, and before the training has ended.
    assert first < 20, "the training gets better to its end: nothing would be seen"
    assert run(script, tmp_path / "first", Signal(signal.SIGKILL, first + 3), **told).code == -signal.SIGKILL
    second = tmp_path / "second"
    second.mkdir()
    (second / "ckpt").touch()  # It makes no old folder there.
    ended = run(script, second, **told)
    assert ended.code == 0, ended.output
    assert json.loads((second / "result.json").read_text())[:2] == expected[:2]
    assert (second / "model.pt").read_bytes() == (whole / "model.pt").read_bytes()


def test_a_folder_that_lacks_something_says_what(tmp_path: Path) -> None:
    """What the Trainer needs to go on is named, one thing after the other."""
    for name, content, missing in (
        ("trainer_state.json", "{", "trainer_state.json"),
        ("trainer_state.json", "[]", "a trainer_state.json that is JSON"),
        ("trainer_state.json", '{"global_step": 3}', "global_step in trainer_state.json"),
        ("model.safetensors", "x", "a model"),
        ("optimizer.pt", "", "an optimizer"),
        ("optimizer.pt", "x", "an optimizer"),
        ("scheduler.pt", "x", "a scheduler"),
        ("rng_state.pth", "x", "the random generators"),
    ):
        assert lacks(tmp_path) == missing
        (tmp_path / name).write_text(content)
    assert lacks(tmp_path) is None


def test_a_model_alone_is_refused(tmp_path: Path) -> None:
    """Where the Trainer would save the model only, the training does not begin."""
    path = script("after", "transformers", tmp_path)
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', "save_only_model=True"))
    ended = run(path, tmp_path, MIZZEN_CHECKPOINT_URI=str(tmp_path / "ckpt"))
    assert ended.code == 1
    assert "ValueError: save_only_model=True: a training cannot go on from the model alone" in ended.output
