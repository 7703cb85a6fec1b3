"""Saving and loading: what goes in comes out, what is kept, what an observer sees."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, StateError, list_committed

STATE: dict[str, Any] = {
    "model": {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "scalar": np.array(2.5),
        "none": np.zeros((0, 3)),
        "flags": [np.array([True, False]), {"a/b~c": np.arange(3, dtype=np.uint16)}],
        "rate": 0.1,
    },
    "alone": np.arange(4, dtype=np.float16),
    "rng": np.random.default_rng(3).bit_generator.state,
    "old-rng": np.random.RandomState(3).get_state(legacy=False),
    "step": 7,
    "best": float("inf"),
    "nothing": None,
    "raw": b"\x00\xff" * 1000,
    "empty": b"",
}


def assert_same(left: Any, right: Any) -> None:
    """Equal in structure, types, shapes, dtypes and values."""
    if isinstance(right, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
        assert left.flags.writeable
    elif isinstance(right, dict):
        assert list(left) == list(right)
        for key, value in right.items():
            assert_same(left[key], value)
    elif isinstance(right, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert type(left) is type(right)
        assert left == right


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Arrays of any order, nesting and emptiness, JSON values and bytes load as they were saved."""
    saved = Checkpointer(tmp_path).save(7, STATE)
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None
    assert (found.step, found.attempt, found.manifest) == (7, 1, saved)
    assert_same(found.state, STATE)


def test_foreign_byte_orders_keep_their_values(tmp_path: Path) -> None:
    """An array of the other byte order loads with the same values in the usual order."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": np.arange(5, dtype=">i4")})
    found = checkpointer.load_latest()
    assert found is not None
    assert_same(found.state["a"], np.arange(5, dtype=np.int32))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [object()]}}, r"part 'a' at b/0: builtins.object is not stored"),
        ({"a": {1: 2}}, r"part 'a': the key 1 is int; keys must be strings"),
        ({"a": np.array(["x"])}, r"part 'a': arrays of <U1 are not stored"),
        ({"a": np.array([object()])}, r"part 'a': arrays of object are not stored"),
        ({"a": {"$array": 1}}, r"the key '\$array' is what the format uses itself"),
        ({"a": {"b": b"x"}}, r"part 'a' at b: builtins.bytes is not stored; .* bytes as a part of their own"),
        ({"../a": 1}, r"part '../a': a name is 1 to 100 letters"),
        ({"": 1}, r"part '': a name is"),
    ],
)
def test_what_is_not_stored_is_refused_by_name(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    """A state that would not come back the same is refused before anything is written."""
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(StateError, match=message):
        checkpointer.save(1, {"good": 1, **state})
    assert list_committed(tmp_path) == []
    assert not list(tmp_path.glob(".draft*"))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    """A step that is no whole number, 0 or more, is refused."""
    with pytest.raises(StateError, match="step="):
        Checkpointer(tmp_path).save(step, {})


def test_a_first_start_finds_nothing(tmp_path: Path) -> None:
    """An empty folder loads None and a folder that is not there lists nothing."""
    checkpointer = Checkpointer(tmp_path / "a" / "b")
    assert checkpointer.load_latest() is None
    assert checkpointer.skipped == ()
    assert list_committed(tmp_path / "nowhere") == []


def test_uris_and_paths_name_the_same_folder(tmp_path: Path) -> None:
    """A file:// URI with escapes and a plain path are the same folder; other schemes and hosts are refused."""
    Checkpointer(f"file://{tmp_path}/a%20b").save(1, {})
    assert [m.step for m in list_committed(tmp_path / "a b")] == [1]
    assert [m.step for m in list_committed(f"file://localhost{tmp_path}/a%20b")] == [1]
    with pytest.raises(ValueError, match=r"'s3://b/k': the scheme 's3' is not supported; give a file:// URI"):
        Checkpointer("s3://b/k")
    with pytest.raises(ValueError, match="no host"):
        Checkpointer("file://elsewhere/folder")
    with pytest.raises(ValueError, match="give uri, or set MIZZEN_CHECKPOINT_URI"):
        Checkpointer()


def test_the_environment_gives_the_defaults_and_arguments_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, attempt, interval, keep and the writing rank come from the environment where they are not given."""
    monkeypatch.setenv("MIZZEN_CHECKPOINT_URI", f"file://{tmp_path}/told")
    monkeypatch.setenv("MIZZEN_ATTEMPT", "4")
    monkeypatch.setenv("MIZZEN_CHECKPOINT_INTERVAL_S", "2.5")
    monkeypatch.setenv("MIZZEN_CHECKPOINT_KEEP", "3")
    monkeypatch.setenv("RANK", "1")
    told = Checkpointer()
    assert (told.root, told.attempt, told.interval_s, told.keep, told.writer) == (tmp_path / "told", 4, 2.5, 3, False)
    given = Checkpointer(tmp_path / "given", attempt=6, interval_s=0, keep=1, writer=True)
    assert (given.root, given.attempt, given.interval_s, given.keep, given.writer) == (
        tmp_path / "given", 6, 0, 1, True
    )  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), [("keep", 0), ("interval_s", -1.0), ("attempt", 0)])
def test_arguments_out_of_range_are_refused(tmp_path: Path, argument: str, value: float) -> None:
    """A number that is too small is refused by name, and nothing is claimed."""
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        Checkpointer(tmp_path / "x", **{argument: value})  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    """After each save the newest `keep` are there and nothing else, hidden or not."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in range(1, 7):
        checkpointer.save(step, {"step": step})
        assert [m.step for m in list_committed(tmp_path)] == list(range(step, max(0, step - 3), -1))
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("step-")) == [".lock", "fence"]


def test_newest_means_committed_last(tmp_path: Path) -> None:
    """A training that went back to an earlier step, or saved a step twice, loads what it saved last."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step, value in [(200, "far"), (100, "back"), (100, "again")]:
        checkpointer.save(step, {"value": value})
        found = checkpointer.load_latest()
        assert found is not None
        assert (found.step, found.state["value"]) == (step, value)
    assert [m.step for m in list_committed(tmp_path)] == [100, 100]


def test_a_newer_attempt_outranks_an_older_one(tmp_path: Path) -> None:
    """What a newer attempt saved is newer, although the older one had come further."""
    Checkpointer(tmp_path, attempt=9).save(500, {})
    Checkpointer(tmp_path, attempt=10).save(400, {})
    assert [(m.attempt, m.step) for m in list_committed(tmp_path)] == [(10, 400), (9, 500)]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """With one damaged, the older valid one stays until enough valid ones are there."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    checkpointer.save(1, {"a": 1})
    damaged = checkpointer.save(2, {"a": 2})
    (tmp_path / damaged.files[0]).unlink()
    checkpointer.save(3, {"a": 3})
    assert [m.step for m in list_committed(tmp_path)] == [3, 1]
    checkpointer.save(4, {"a": 4})
    assert [m.step for m in list_committed(tmp_path)] == [4, 3]
    assert not (tmp_path / damaged.name).exists()


def test_only_the_writer_saves(tmp_path: Path) -> None:
    """A rank other than 0 loads and may not save."""
    Checkpointer(tmp_path, attempt=1).save(5, {"a": 1})
    other = Checkpointer(tmp_path, attempt=1, writer=False)
    found = other.load_latest()
    assert found is not None and found.step == 5
    with pytest.raises(CheckpointError, match="does not save"):
        other.save(6, {})


def test_the_manifest_tells_an_observer_all(tmp_path: Path) -> None:
    """Step, attempt, time, sizes and checksums can be read with a JSON parser and match the files."""
    saved = Checkpointer(tmp_path, attempt=3).save(12, {"a": b"abc", "b": {"x": 1}})
    body = json.loads((tmp_path / saved.name / "manifest.json").read_text())
    assert (body["format"], body["step"], body["attempt"], body["save"]) == ("mizzen.checkpoint/1", 12, 3, 1)
    assert body["created_at_s"] == saved.created_at_s
    assert body["bytes"] == 3 + len('{"x":1}') == saved.size_bytes
    assert [(p["name"], p["file"], p["kind"], p["bytes"]) for p in body["parts"]] == [
        ("a", "part-a.bin", "bytes", 3),
        ("b", "part-b.json", "json", 7),
    ]
    assert list_committed(tmp_path, verify=True) == [saved]


def test_a_copy_is_a_checkpoint_once_its_manifest_is_there(tmp_path: Path) -> None:
    """Copied object by object, a checkpoint is invisible until its manifest, the last file, is there; then it loads."""
    source, target = tmp_path / "source", tmp_path / "target"
    writer = Checkpointer(source, attempt=2)
    writer.save(1, STATE)
    manifest = writer.save(2, STATE)
    target.mkdir()
    for index, file in enumerate(manifest.files):
        assert list_committed(target) == [], f"visible after {index} files"
        (target / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, target / file)
    assert list_committed(target, verify=True) == [manifest]
    moved = Checkpointer(target, attempt=3)
    found = moved.load_latest()
    assert found is not None
    assert_same(found.state, STATE)
    moved.save(3, STATE)
    assert [m.step for m in list_committed(target)] == [3, 2]


def test_a_copy_without_its_manifest_is_passed_over(tmp_path: Path) -> None:
    """A newer copy that was not finished is named in a warning, and the one before it loads."""
    source, target = tmp_path / "source", tmp_path / "target"
    old = Checkpointer(source, attempt=1).save(1, {"a": 1})
    new = Checkpointer(source, attempt=2).save(2, {"a": 2})
    shutil.copytree(source / old.name, target / old.name)
    shutil.copytree(source / new.name, target / new.name, ignore=shutil.ignore_patterns("manifest.json"))
    assert list_committed(target) == [old]
    moved = Checkpointer(target, attempt=3)
    with pytest.warns(CheckpointWarning, match=f"{new.name} is passed over: manifest.json is missing"):
        found = moved.load_latest()
    assert found is not None and found.step == 1
    moved.save(3, {})
    moved.save(4, {})
    assert not (target / new.name).exists()


def test_a_load_survives_the_removal_of_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose checkpoint is replaced under its hands loads, or lists, the newer one, without a warning."""
    import mizzen.checkpoint.reading as reading

    writer = Checkpointer(tmp_path, attempt=1, keep=1)
    writer.save(1, {"a": 1})
    real = reading.read_manifest
    last = 3

    def slow(root: Path, identity: Any) -> Any:
        if identity.step < last:
            writer.save(identity.step + 1, {"a": identity.step + 1})
        return real(root, identity)

    monkeypatch.setattr(reading, "read_manifest", slow)
    reader = Checkpointer(tmp_path, attempt=1, writer=False)
    found = reader.load_latest()
    assert found is not None and found.state == {"a": 3}
    assert reader.skipped == ()
    last = 6
    assert [m.step for m in list_committed(tmp_path)] == [6]
    last = 100
    with pytest.raises(CheckpointError, match="removed faster than they could be read"):
        list_committed(tmp_path)


def test_should_save_goes_by_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is True once the interval has passed since the start or the last save, and not twice for the same step."""
    from mizzen.checkpoint import checkpointer as module

    class Clock:
        now_s = 50.0

        def monotonic(self) -> float:
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    checkpointer = Checkpointer(tmp_path, interval_s=10.0)
    clock.now_s = 59.9
    assert not checkpointer.should_save()
    clock.now_s = 60.0
    assert checkpointer.should_save() and checkpointer.should_save(3)
    checkpointer.save(3, {})
    assert not checkpointer.should_save()
    clock.now_s = 70.0
    assert checkpointer.should_save(4)
    assert not checkpointer.should_save(3)
