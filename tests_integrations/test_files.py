"""Tests of `FileCheckpoints`: files are restored unchanged, and a failed save does not stop the training."""

from pathlib import Path

import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointWarning,
    StaleAttemptError,
    StateError,
    list_committed,
)
from mizzen.integrations.files import FileCheckpoints


def files(root: Path) -> FileCheckpoints:
    """Returns the `FileCheckpoints` of a gang of one."""
    return FileCheckpoints(Checkpointer(root), lambda number: number)


def test_folders_come_back(tmp_path: Path) -> None:
    """Files of any name, depth and size are restored at their paths, and further parts are in the state."""
    folder = tmp_path / "folder"
    expected = {"a.pt": b"x" * 1000, "deep/a.pt": b"y", "deep/er/with space, ü": b"", "files": b"z", ".hidden": b"h"}
    for name, content in expected.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert files(tmp_path / "root").load() is None
    files(tmp_path / "root").save(3, folder, {"rng": {"seed": 1}})
    loaded = files(tmp_path / "root").load()
    assert loaded is not None
    paths = [path for path in loaded.folder.rglob("*") if path.is_file()]
    assert {path.relative_to(loaded.folder).as_posix(): path.read_bytes() for path in paths} == expected
    assert (loaded.step, loaded.state) == (3, {"rng": {"seed": 1}})
    loaded.close()
    assert not loaded.folder.exists()


def test_a_save_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk causes a warning. A newer attempt, or a state that cannot be stored, is an error."""
    one = files(tmp_path / "root")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"a")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(one.checkpointer, "_save", full)
        with pytest.warns(CheckpointWarning, match="step 1 was not saved: .*No space left"):
            one.save(1, folder)
    with pytest.raises(StateError):
        one.save(1, folder, {"bad": object()})
    one.save(1, folder)
    Checkpointer(tmp_path / "root").claim()
    with pytest.raises(StaleAttemptError):
        one.save(2, folder)


def test_what_could_not_be_loaded_is_not_committed(tmp_path: Path) -> None:
    """A save of an empty, missing or incomplete folder is rejected with a warning; a load of one is an error."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b").write_bytes(b"b")

    def lacks(there: Path) -> str | None:
        return None if (there / "a").exists() else "a"

    one = FileCheckpoints(Checkpointer(tmp_path / "root"), lambda number: number, lacks)
    (tmp_path / "empty").mkdir()
    for bad, missing in ((folder, "a"), (tmp_path / "empty", "any file"), (tmp_path / "gone", "any file")):
        with pytest.warns(CheckpointWarning, match=f"step 1 was not saved: .* lacks {missing}"):
            one.save(1, bad)
    assert list_committed(tmp_path / "root") == []
    files(tmp_path / "root").save(1, folder)
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 lacks a"):
        one.load()
    Checkpointer(tmp_path / "other").save(4, {"a": 1})
    with pytest.raises(CheckpointError, match="the checkpoint of step 4 lacks the files of a framework"):
        files(tmp_path / "other").load()
