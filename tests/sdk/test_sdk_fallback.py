"""Loading falls back past what is damaged, and says which and why."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mizzen.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, list_committed

STATE = {"model": {"w": np.arange(300.0)}, "rng": {"seed": 5}, "raw": b"x" * 300}
FILES = ("part-model.safetensors", "part-rng.json", "part-raw.bin", "manifest.json")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" x")


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [_flip, _cut, _grow, _empty, Path.unlink, _folder])
def test_any_damage_to_any_file_falls_back(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    """Whatever happens to whichever file of the newest checkpoint, the one before loads and the warning names both."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)
    newest = checkpointer.save(2, STATE)
    damage(tmp_path / newest.name / file)
    with pytest.warns(CheckpointWarning, match=f"{newest.name} is passed over: {file}"):
        found = checkpointer.load_latest()
    assert found is not None and found.step == 1
    assert [entry.name for entry in checkpointer.skipped] == [newest.name]
    assert file in checkpointer.skipped[0].reason
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [1]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """No single flipped bit anywhere in a checkpoint goes unnoticed."""
    chance = random.Random(7)
    newest = Checkpointer(tmp_path).save(1, STATE)
    for file in newest.files:
        original = (tmp_path / file).read_bytes()
        for _ in range(60):
            data = bytearray(original)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            (tmp_path / file).write_bytes(data)
            assert list_committed(tmp_path, verify=True) == []
        (tmp_path / file).write_bytes(original)
    assert list_committed(tmp_path, verify=True) == [newest]


def test_it_falls_back_as_far_as_needed(tmp_path: Path) -> None:
    """Several damaged ones are passed over, newest first; with nothing left, nothing is loaded."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    saved = [checkpointer.save(step, STATE) for step in (1, 2, 3)]
    _flip(tmp_path / saved[2].files[0])
    (tmp_path / saved[1].files[-1]).unlink()
    with pytest.warns(CheckpointWarning):
        found = checkpointer.load_latest()
    assert found is not None and found.step == 1
    assert [entry.name for entry in checkpointer.skipped] == [saved[2].name, saved[1].name]
    _empty(tmp_path / saved[0].files[1])
    with pytest.warns(CheckpointWarning):
        assert checkpointer.load_latest() is None
    assert len(checkpointer.skipped) == 3


def test_a_manifest_under_another_name_is_not_believed(tmp_path: Path) -> None:
    """A checkpoint's folder that was renamed to a newer step is passed over."""
    checkpointer = Checkpointer(tmp_path)
    saved = checkpointer.save(1, STATE)
    shutil.copytree(tmp_path / saved.name, tmp_path / saved.name.replace("n0001", "n0002"))
    with pytest.warns(CheckpointWarning, match=f"is that of {saved.name}"):
        found = checkpointer.load_latest()
    assert found is not None and found.step == 1


def test_a_later_format_is_passed_over(tmp_path: Path) -> None:
    """A manifest of a format that this version does not know is passed over with the format's name."""
    import mizzen.checkpoint.manifest as manifest

    checkpointer = Checkpointer(tmp_path)
    saved = checkpointer.save(1, STATE)
    path = tmp_path / saved.files[-1]
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    body["format"] = "mizzen.checkpoint/9"
    body["manifest_sha256"] = manifest._digest(body)
    path.write_text(json.dumps(body))
    with pytest.warns(CheckpointWarning, match="has format 'mizzen.checkpoint/9'"):
        assert checkpointer.load_latest() is None


def test_a_missing_permission_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot be read for another reason than damage, loading stops instead of starting from an old one."""
    checkpointer = Checkpointer(tmp_path)
    saved = checkpointer.save(1, STATE)
    path = tmp_path / saved.files[-1]
    path.unlink()
    path.symlink_to(path)  # A circle: unreadable for root, too.
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpointer.load_latest()


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    """A save for which there is no space raises, leaves no file behind, and the one before still loads."""
    import resource
    import signal

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpointer.save(2, {"a": 2, "big": b"x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    found = checkpointer.load_latest()
    assert found is not None and found.step == 1
