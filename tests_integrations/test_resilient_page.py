"""Tests of the scripts in docs/resilient.md: after kills and notices, they end as without interruption."""

import re
import signal
from pathlib import Path

import lightning  # noqa: F401  # Imported before the forks.
import pytest
import transformers  # noqa: F401

from mizzen.checkpoint import list_committed
from tests_integrations.pages import PAGE, SCRIPTS, changed_lines, script
from tests_integrations.scripts import Ended, Signal, run, run_gang

NAMES = ["plain", "sampler", "prefetch", "ddp", "transformers", "lightning"]
# The number of steps of a whole training, and of an epoch.
STEPS = dict.fromkeys(NAMES, (32, 8)) | {"transformers": (18, 6)}
RESULT = dict.fromkeys(NAMES, "model.pt") | {"transformers": "final/model.safetensors"}


def one(name: str, path: Path, folder: Path, told: Signal | None = None, **variables: str) -> Ended:
    """Runs a script once. For a gang, returns the result of the signalled rank, else of rank 0."""
    if name == "ddp":
        # Signal rank 1, which does not save.
        ended = run_gang(path, folder, {1: told} if told else None, **variables)
        leader, follower = ended
        # If one rank is killed, the other fails by its broken connection, unless it is killed before.
        assert leader.code == follower.code or follower.code == -signal.SIGKILL, leader.output + follower.output
        return follower if told else leader
    return run(path, folder, told, **variables)


@pytest.fixture(scope="session", params=NAMES)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, bytes]:
    """The name of an integration, its resilient script, and its result without interruption."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    path = script("after", name, folder)
    ended = one(name, path, folder, MIZZEN_CHECKPOINT_URI=str(folder / "ckpt"), MIZZEN_CHECKPOINT_INTERVAL_S="3600")
    assert ended.code == 0, ended.output
    return name, path, (folder / RESULT[name]).read_bytes()


def test_the_page_has_all_pairs() -> None:
    """Each integration has a script before and after, and no script is left out of the tests."""
    assert set(SCRIPTS) == {(when, name) for when in ("before", "after") for name in NAMES} | {("check", "resume")}
    assert PAGE.read_text().count("```python") == len(SCRIPTS)


def test_the_check_runs_and_finds_what_is_missing(tmp_path: Path) -> None:
    """The script that checks a resume succeeds. If the state lacks the position, it fails and names the difference."""
    path = script("check", "resume", tmp_path)
    ended = run(path, tmp_path)
    assert ended.code == 0, ended.output
    text = path.read_text()
    hidden = text.replace('"data": {"position": 0}}', "}").replace('state["data"]', "data")
    path.write_text(hidden.replace("def make", 'data = {"position": 0}\n\n\ndef make'))
    ended = run(path, tmp_path)
    assert ended.code == 1 and "after the restore, first at model/0.weight" in ended.output


@pytest.mark.parametrize("name", NAMES)
def test_less_than_ten_lines_change(name: str) -> None:
    """The resilient script differs from the ordinary one in fewer than ten lines."""
    assert 0 < changed_lines(name) < 10


@pytest.mark.parametrize("name", NAMES)
def test_the_ordinary_scripts_run(name: str, tmp_path: Path) -> None:
    """The ordinary scripts on the page run without errors."""
    ended = one(name, script("before", name, tmp_path), tmp_path)
    assert ended.code == 0, ended.output
    assert (tmp_path / RESULT[name]).exists()


def test_killed_again_and_again(uninterrupted: tuple[str, Path, bytes], tmp_path: Path) -> None:
    """After kills within epochs and at their ends, the result has the same bytes as without interruption."""
    name, path, expected = uninterrupted
    root = tmp_path / "ckpt"
    told = {"MIZZEN_CHECKPOINT_URI": str(root), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    steps, per_epoch = STEPS[name]
    # The kill comes before the save of its step, so the newest checkpoint is that of the step before.
    newest = 0
    for goal in (3, per_epoch + 1, 2 * per_epoch + 2, 2 * per_epoch + 5):
        ended = one(name, path, tmp_path, Signal(signal.SIGKILL, goal - newest), **told)
        assert ended.code == -signal.SIGKILL, ended.output
        newest = list_committed(root)[0].step
        assert newest == goal - 1
    ended = one(name, path, tmp_path, **told)
    assert ended.code == 0, ended.output
    assert list_committed(root, verify=True)[0].step == steps
    assert (tmp_path / RESULT[name]).read_bytes() == expected
    # After the end, a new run loads the last checkpoint and trains no more steps.
    ended = one(name, path, tmp_path, Signal(signal.SIGKILL, 1), **told)
    assert ended.code == 0, ended.output
    assert (tmp_path / RESULT[name]).read_bytes() == expected


NOISE = """
import random
from torch.utils.data import default_collate

random.seed(1)  # Python seeds it anew in each fork.


class Noisy:
    def __init__(self, *tensors):
        self.samples = tensors[0] if len(tensors) == 1 else data.TensorDataset(*tensors)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        if isinstance(sample, dict):
            return {name: torch.where(torch.rand(16) < 0.1, random.randrange(64), row) for name, row in sample.items()}
        return sample[0] + 0.1 * torch.randn(20) + random.random(), sample[1]


def noisy(samples):
    batch = default_collate(samples)
    if isinstance(batch, dict):
        return {name: torch.where(torch.rand(rows.shape) < 0.1, 0, rows) for name, rows in batch.items()}
    return batch[0] * (torch.rand(batch[0].shape) > 0.1), batch[1]


"""
WITH_NOISE = (
    ("data.TensorDataset(t", "Noisy(t"),
    ("num_workers=2", ""),
    ("batch_size=32", "batch_size=32, collate_fn=noisy, num_workers=WORKERS"),
    ("batch_size=16", "batch_size=16, collate_fn=noisy, num_workers=WORKERS"),
    ("train_dataset=data", "train_dataset=Noisy(data), data_collator=noisy"),
    ('report_to="none"', 'report_to="none", remove_unused_columns=False, dataloader_num_workers=WORKERS'),
)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "prefetch"])
def test_exact_with_noise_in_dataset_and_collator(name: str, workers: int, tmp_path: Path) -> None:
    """With noise in dataset and collator, and with workers, the page's scripts are exact after kills within epochs."""
    text = SCRIPTS["after", name]
    for old, new in WITH_NOISE:
        text = text.replace(old, new)
    assert "Noisy(" in text and "=noisy" in text
    lines = text.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith(("import ", "from ")))
    path = tmp_path / "script.py"
    whole = "".join([*lines[: last + 1], NOISE, *lines[last + 1 :]])
    path.write_text(whole.replace("WORKERS", str(workers)))
    ends = []
    for folder, goals in (("whole", ()), ("killed", (3, STEPS[name][1] + 1, 4))):
        told = {"MIZZEN_CHECKPOINT_URI": str(tmp_path / folder / "ckpt"), "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
        for goal in goals:
            ended = one(name, path, tmp_path / folder, Signal(signal.SIGKILL, goal), **told)
            assert ended.code == -signal.SIGKILL, ended.output
        ended = one(name, path, tmp_path / folder, **told)
        assert ended.code == 0, ended.output
        assert "CheckpointWarning" not in ended.output
        ends.append((tmp_path / folder / RESULT[name]).read_bytes())
    assert ends[0] == ends[1]


def test_told_to_stop(uninterrupted: tuple[str, Path, bytes], tmp_path: Path) -> None:
    """After SIGTERM the training saves its current step, exits with code 143, and resumes from that step."""
    name, path, expected = uninterrupted
    root = tmp_path / "ckpt"
    told = {"MIZZEN_CHECKPOINT_URI": str(root), "MIZZEN_CHECKPOINT_INTERVAL_S": "3600", "MIZZEN_PLATFORM": "sigterm"}
    ended = one(name, path, tmp_path, Signal(signal.SIGTERM, STEPS[name][1] + 3), **told)
    assert ended.code == 143, ended.output
    [saved] = list_committed(root, verify=True)
    assert saved.step == STEPS[name][1] + 3
    ended = one(name, path, tmp_path, **told)
    assert ended.code == 0, ended.output
    assert (tmp_path / RESULT[name]).read_bytes() == expected
    assert not re.search(r"Traceback", ended.output)
