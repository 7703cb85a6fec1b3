"""Tests of the Trainer's output folder with the callback for transformers."""

import json
import signal
from pathlib import Path

import pytest
import transformers  # noqa: F401  # Imported before the forks.

from mizzen.checkpoint import list_committed
from mizzen.integrations.transformers import lacks
from tests_integrations.kill_loops import FOLDER as TRAININGS
from tests_integrations.kill_loops import results
from tests_integrations.pages import SCRIPTS, script
from tests_integrations.scripts import Signal, run

EXACT = TRAININGS.parent / "exact"


def test_its_folders_go_and_others_stay(tmp_path: Path) -> None:
    """The callback's folders are removed, also those of a killed process. The Trainer's own checkpoints remain."""
    left = tmp_path / "out" / ".mizzen" / "checkpoint-99"
    left.mkdir(parents=True)
    path = script("after", "transformers", tmp_path)
    own = 'save_strategy="steps", save_steps=9'
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', own))
    told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    ended = run(path, tmp_path, **told)
    assert ended.code == 0, ended.output
    assert list_committed(tmp_path / "ckpt")[0].step == 18
    # Steps 9 and 18 were saved by the Trainer's own strategy too.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-18", "checkpoint-9"]


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_rotation_takes_nothing_that_is_not_stored(strategy: str, tmp_path: Path) -> None:
    """Each save is complete and loads, although the Trainer keeps one checkpoint and an old one has a higher number."""
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
    assert "CheckpointWarning" not in ended.output
    assert list_committed(tmp_path / "ckpt", verify=True)[0].step == 18


def test_a_stream_that_ends_often(tmp_path: Path) -> None:
    """The Trainer resumes within the second pass of a stream, and trains no more steps after its last one.

    A pass has 9 steps, but the Trainer takes `max_steps` for an epoch. If that changes, a warning tells it.
    """
    stream = EXACT / "transformers_stream.py"
    told = {"MIZZEN_CHECKPOINT_URI": "ckpt", "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    assert run(stream, tmp_path / "whole", **told).code == 0
    for steps in (10, 6):
        assert run(stream, tmp_path / "killed", Signal(signal.SIGKILL, steps), **told).code == -signal.SIGKILL
    for _ in range(2):
        ended = run(stream, tmp_path / "killed", **told)
        assert ended.code == 0 and "CheckpointWarning" not in ended.output, ended.output
        assert list_committed(tmp_path / "killed" / "ckpt")[0].step == 22
        assert results(tmp_path / "killed") == results(tmp_path / "whole")
    longer = tmp_path / "longer.py"
    longer.write_text(stream.read_text().replace("max_steps=22", "max_steps=24"))
    ended = run(longer, tmp_path / "killed", **told)
    assert ended.code == 0 and "has 24 steps, but 22 when the checkpoint was saved" in ended.output, ended.output
    assert list_committed(tmp_path / "killed" / "ckpt")[0].step == 24


def test_the_best_model_comes_along(tmp_path: Path) -> None:
    """On another machine with an empty output folder, the Trainer loads the earlier best model at its end."""
    script = TRAININGS / "transformers_trainer.py"
    told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    whole = tmp_path / "whole"
    assert run(script, whole, **(told | {"MIZZEN_CHECKPOINT_URI": str(tmp_path / "other")})).code == 0
    _, best, *_ = expected = json.loads((whole / "result.json").read_text())
    first = int(best.rpartition("-")[2])
    # The first machine is lost after the best model was found and before the training ends.
    assert first < 20, "the best model must come before the end, or the test checks nothing"
    assert run(script, tmp_path / "first", Signal(signal.SIGKILL, first + 3), **told).code == -signal.SIGKILL
    second = tmp_path / "second"
    second.mkdir()
    (second / "ckpt").touch()  # The script then creates no old folder there.
    ended = run(script, second, **told)
    assert ended.code == 0, ended.output
    assert json.loads((second / "result.json").read_text())[:2] == expected[:2]
    assert (second / "model.pt").read_bytes() == (whole / "model.pt").read_bytes()


def test_a_folder_that_lacks_something_says_what(tmp_path: Path) -> None:
    """`lacks` names each missing or invalid file that the Trainer needs to resume."""
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
    """With `save_only_model=True` the training does not start."""
    path = script("after", "transformers", tmp_path)
    path.write_text(SCRIPTS["after", "transformers"].replace('save_strategy="no"', "save_only_model=True"))
    ended = run(path, tmp_path, MIZZEN_CHECKPOINT_URI=str(tmp_path / "ckpt"))
    assert ended.code == 1
    assert "ValueError: save_only_model=True: a training cannot resume from the model alone" in ended.output
