"""Saving and loading of states, the retention of checkpoints, and what an observer can read."""

import hashlib
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    Pickled,
    StaleAttemptError,
    StateError,
    list_committed,
)
from mizzen.checkpoint.place import Gang, Retention
from mizzen.objects.files import FileStore

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
    """Asserts equal structure, types, shapes, dtypes and values."""
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


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` at the start of a path is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Checkpointer("~/runs").save(1, {"step": 1})
    assert [manifest.step for manifest in list_committed(tmp_path / "home" / "runs")] == [1]
    assert not (tmp_path / "~").exists()


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Arrays of any memory order, nested and empty ones, JSON values and bytes load as they were saved."""
    saved = Checkpointer(tmp_path).save(7, STATE)
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None
    assert (found.step, found.attempt, found.manifest) == (7, 1, saved)
    assert_same(found.state, STATE)


def test_foreign_byte_orders_keep_their_values(tmp_path: Path) -> None:
    """An array in the other byte order loads with the same values in native order."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": np.arange(5, dtype=">i4")})
    found = checkpointer.load_latest()
    assert found is not None
    assert_same(found.state["a"], np.arange(5, dtype=np.int32))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [object()]}}, r"part 'a' at b/0: builtins.object cannot be stored"),
        ({"a": {object: 2}}, r"part 'a': the key <class 'object'> is builtins.type; use strings, numbers"),
        ({"a": np.array(["x"])}, r"part 'a': arrays of <U1 cannot be stored"),
        ({"a": np.array([object()])}, r"part 'a': arrays of object cannot be stored"),
        ({"a": Path("no/such")}, r"part 'a': the file no/such cannot be read: .*No such file"),
        ({"a": Pickled(lambda: 1)}, r"part 'a': it cannot be pickled"),
        ({"../a": 1}, r"part '../a': a name must be 1 to 100 letters"),
        ({"": 1}, r"part '': a name must be"),
    ],
)
def test_what_is_not_stored_is_refused_by_name(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    """A state that cannot be restored exactly is an error before anything is written."""
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(StateError, match=message):
        checkpointer.save(1, {"good": 1, **state})
    assert list_committed(tmp_path) == []
    assert not list(tmp_path.glob(".draft*"))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    """A step that is not an integer of 0 or more is an error."""
    with pytest.raises(StateError, match="step="):
        Checkpointer(tmp_path).save(step, {"a": 1})


def test_a_first_start_finds_nothing(tmp_path: Path) -> None:
    """`load_latest` returns None for a new root, and `list_committed` returns nothing for a missing folder."""
    checkpointer = Checkpointer(tmp_path / "a" / "b")
    assert checkpointer.load_latest() is None
    assert checkpointer.skipped == ()
    assert list_committed(tmp_path / "nowhere") == []


def test_uris_and_paths_name_the_same_folder(tmp_path: Path) -> None:
    """A path and a file:// URI with escapes can name the same folder. Other schemes and hosts are errors."""
    Checkpointer(f"file://{tmp_path}/a%20b").save(1, {"a": 1})
    assert [m.step for m in list_committed(tmp_path / "a b")] == [1]
    assert [m.step for m in list_committed(f"file://localhost{tmp_path}/a%20b")] == [1]
    with pytest.raises(
        ValueError, match=r"'az://b/k': the scheme 'az' is not supported; use a path, file://, s3:// or gs://"
    ):
        Checkpointer("az://b/k")
    with pytest.raises(ValueError, match="no host"):
        Checkpointer("file://elsewhere/folder")
    with pytest.raises(ValueError, match="pass uri, or set MIZZEN_CHECKPOINT_URI"):
        Checkpointer()


def test_the_environment_gives_the_defaults_and_arguments_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, attempt, interval, keep and rank default to environment variables; arguments take precedence."""
    monkeypatch.setenv("MIZZEN_CHECKPOINT_URI", f"file://{tmp_path}/told")
    monkeypatch.setenv("MIZZEN_ATTEMPT", "4")
    monkeypatch.setenv("MIZZEN_CHECKPOINT_INTERVAL_S", "2.5")
    monkeypatch.setenv("MIZZEN_CHECKPOINT_KEEP", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = Checkpointer()
    assert told.root == (tmp_path / "told").as_uri()
    assert (told.attempt, told.cadence.explain().interval_s, told.retention.keep) == (4, 2.5, 3)
    assert (told.gang, told.writer) == (Gang(1, 2), False)
    given = Checkpointer(
        tmp_path / "given",
        attempt=6,
        interval_s=0,
        keep=1,
        settings=CheckpointSettings(keep_every=5, rank=0, world_size=1),
    )
    assert given.root == (tmp_path / "given").as_uri()
    assert (given.attempt, given.cadence.explain().interval_s) == (6, 0)
    assert (given.retention, given.gang, given.writer) == (Retention(1, 5), Gang(0, 1), True)


def _checkpointer(root: Path, name: str, value: Any) -> Checkpointer:
    """Returns a checkpointer with one argument, or one setting."""
    if name in {field.name for field in fields(CheckpointSettings)}:
        return Checkpointer(root, settings=CheckpointSettings(**{name: value}))
    return Checkpointer(root, **{name: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [("keep", 0), ("keep_every", 0), ("interval_s", -1.0), ("attempt", 0), ("rank", 1), ("world_size", 0)],
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, argument: str, value: float) -> None:
    """A number out of its range is an error that names the argument, and the root is not claimed."""
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        _checkpointer(tmp_path / "x", argument, value)
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_needs_a_part(tmp_path: Path) -> None:
    """A state without parts is an error, and claims nothing; a part may be empty."""
    with pytest.raises(StateError, match="state: has no parts; a checkpoint needs at least one"):
        Checkpointer(tmp_path).save(1, {})
    assert not list(tmp_path.iterdir())
    assert Checkpointer(tmp_path).save(1, {"a": {}}).parts[0].name == "a"


def test_steps_of_numpy_are_steps(tmp_path: Path) -> None:
    """A step may be an integer of numpy; its record has a plain number."""
    checkpointer = Checkpointer(tmp_path, interval_s=0, keep=9)
    checkpointer.track(a={"x": 1})
    checkpointer.restore()
    checkpointer.step(np.int64(1))
    checkpointer.save(np.uint8(2), {"a": 2})
    assert checkpointer.save_async(np.int32(3), {"a": 3}).wait().step == 3
    assert [type(m.step) for m in list_committed(tmp_path)] == [int] * 3
    for wrong in (True, 1.0, np.float64(1), np.bool_(True), -1, "1"):
        with pytest.raises(StateError, match=r"step=.*: must be an integer, 0 or more"):
            checkpointer.step(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "right"), [("s3://bucket/a", "s3://bucket/a/run"), ("file:///a", "file:///a/run")])
def test_a_uri_in_a_path_is_refused(path: str, right: str) -> None:
    """A Path of a URI has lost a slash: the error names the right string, instead of using a local folder."""
    with pytest.raises(ValueError, match=f"of which a Path keeps only one; use the string '{right}'"):
        Checkpointer(Path(path) / "run")


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    """After each save the root has only the newest `keep` checkpoints, and no other files."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in range(1, 7):
        checkpointer.save(step, {"step": step})
        assert [m.step for m in list_committed(tmp_path)] == list(range(step, max(0, step - 3), -1))
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert [file for file in files if file.startswith("log/")] == [f"log/000000000{n}.json" for n in (5, 6, 7)]
    assert len(files) == 9, "a record, its copy and a part for each"


def test_some_are_kept_for_good(tmp_path: Path) -> None:
    """With `keep_every=n`, the checkpoints of every n-th step stay, in addition to the newest ones."""
    checkpointer = Checkpointer(tmp_path, keep=1, settings=CheckpointSettings(keep_every=4))
    for step in range(1, 11):
        checkpointer.save(step, {"step": step})
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [10, 8, 4]


def test_newest_means_committed_last(tmp_path: Path) -> None:
    """After a training went back to an earlier step, or saved a step twice, the last committed checkpoint is loaded."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step, value in [(200, "far"), (100, "back"), (100, "again")]:
        checkpointer.save(step, {"value": value})
        found = checkpointer.load_latest()
        assert found is not None
        assert (found.step, found.state["value"]) == (step, value)
    assert [m.step for m in list_committed(tmp_path)] == [100, 100]


def test_a_newer_attempt_outranks_an_older_one(tmp_path: Path) -> None:
    """A checkpoint of a newer attempt counts as newer, even if the older attempt reached a later step."""
    Checkpointer(tmp_path, attempt=9).save(500, {"a": 1})
    Checkpointer(tmp_path, attempt=10).save(400, {"a": 1})
    assert [(m.attempt, m.step) for m in list_committed(tmp_path)] == [(10, 400), (9, 500)]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """If a checkpoint is damaged, an older intact one is kept until there are enough intact ones."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    checkpointer.save(1, {"a": 1})
    damaged = checkpointer.save(2, {"a": 2})
    (tmp_path / damaged.parts[0].key).unlink()
    checkpointer.save(3, {"a": 3})
    assert [m.step for m in list_committed(tmp_path)] == [3, 1]
    checkpointer.save(4, {"a": 4})
    assert [m.step for m in list_committed(tmp_path)] == [4, 3]
    assert len(list((tmp_path / "log").iterdir())) == 2


def test_only_the_writer_saves(tmp_path: Path) -> None:
    """A rank other than 0 can load, but a save is an error."""
    Checkpointer(tmp_path, attempt=1).save(5, {"a": 1})
    other = Checkpointer(tmp_path, attempt=1, settings=CheckpointSettings(rank=1, world_size=2))
    found = other.load_latest()
    assert found is not None and found.step == 5
    with pytest.raises(CheckpointError, match="does not save"):
        other.save(6, {"a": 1})


def test_the_manifest_tells_an_observer_all(tmp_path: Path) -> None:
    """The record is JSON with step, attempt, time, sizes and checksums that match the files."""
    saved = Checkpointer(tmp_path, attempt=3, settings=CheckpointSettings(checksum="sha256")).save(
        12, {"a": b"abc", "b": {"x": 1}}
    )
    body = json.loads((tmp_path / "log" / "0000000002.json").read_text())
    assert (body["format"], body["step"], body["attempt"], body["save"]) == ("mizzen.checkpoint/2", 12, 3, 1)
    assert (body["created_at_s"], body["world_size"]) == (saved.created_at_s, 1)
    assert body["bytes"] == 3 + len('{"x":1}') == saved.size_bytes
    files = {part["name"]: tmp_path / part["key"] for part in body["parts"]}
    assert {name: path.name for name, path in files.items()} == {"a": "part-a.bin", "b": "part-b.json"}
    for part in body["parts"]:
        content = files[part["name"]].read_bytes()
        assert part["size_bytes"] == len(content)
        assert part["checksum"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert list_committed(tmp_path, verify=True) == [saved]


def test_a_part_that_has_not_changed_is_not_put_again(tmp_path: Path) -> None:
    """Checkpoints share the file of an unchanged part, which is deleted with the last checkpoint that needs it."""
    checkpointer = Checkpointer(tmp_path, keep=1)
    frozen, kept = np.arange(100_000.0), []
    for step in range(1, 5):
        saved = checkpointer.save(step, {"frozen": frozen, "head": np.full(1000, step), "few": {"lr": 0.1}})
        kept.append({part.name: part.key for part in saved.parts})
        found = checkpointer.load_latest()
        assert found is not None
        assert_same(found.state["frozen"], frozen)
    assert len({keys["frozen"] for keys in kept}) == len({keys["few"] for keys in kept}) == 1
    assert len({keys["head"] for keys in kept}) == 4
    frozen[77_777] += 1
    changed = checkpointer.save(5, {"frozen": frozen, "head": np.full(1000, 5), "few": {"lr": 0.1}})
    assert {part.name: part.key for part in changed.parts}["frozen"] != kept[0]["frozen"]
    files = {path for path in tmp_path.rglob("part-*") if path.is_file()}
    assert files == {tmp_path / part.key for part in changed.parts}


def test_what_a_save_will_remove_leaves_memory_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a save, the page cache is dropped for exactly the parts that retention deletes after its commit."""
    told: list[str] = []
    monkeypatch.setattr(FileStore, "forget", lambda _, key: told.append(key))
    checkpointer = Checkpointer(tmp_path, keep=2, settings=CheckpointSettings(keep_every=3))
    gone = []
    for step in range(1, 7):
        before = {str(path.relative_to(tmp_path)) for path in (tmp_path / "parts").rglob("part-*")}
        told.clear()
        checkpointer.save(step, {"same": b"same", "new": np.full(9, step)})
        after = {str(path.relative_to(tmp_path)) for path in (tmp_path / "parts").rglob("part-*")}
        assert set(told) == before - after
        gone.append(len(told))
    assert gone == [0, 0, 1, 1, 0, 1]


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_an_object_store_is_a_root_as_well(kind: str, request: pytest.FixtureRequest) -> None:
    """On S3 and Google Cloud Storage, states load, retention works, and (on S3) an older attempt cannot save."""
    root: str = request.getfixturevalue(f"{kind}_url")
    checkpointer = Checkpointer(root, attempt=1)
    assert checkpointer.load_latest() is None
    big = np.arange(3_000_000, dtype="f8")
    for step in (1, 2, 3):
        checkpointer.save(step, {**STATE, "big": big + step})
    assert [m.step for m in list_committed(root, verify=True)] == [3, 2]
    found = Checkpointer(root, attempt=2).load_latest()
    assert found is not None and found.step == 3
    assert_same(found.state, {**STATE, "big": big + 3})
    if kind == "s3":
        with pytest.raises(StaleAttemptError):
            checkpointer.save(4, STATE)


def test_checksums_are_of_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    """Checkpoints load with either checksum algorithm; an unknown algorithm is an error that names it."""
    for step, algorithm in enumerate(("sha256", "xxh3_128"), 1):
        saved = Checkpointer(tmp_path, settings=CheckpointSettings(checksum=algorithm)).save(step, STATE)
        assert {part.checksum.split(":")[0] for part in saved.parts} == {algorithm}
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [2, 1]
    with pytest.raises(ValueError, match="checksum='md5': must be one of xxh3_128, sha256"):
        Checkpointer(tmp_path, settings=CheckpointSettings(checksum="md5"))


def test_a_load_survives_the_removal_of_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a checkpoint is replaced while it is read, the newer one is loaded or listed, without a warning."""
    import mizzen.checkpoint.reader as reading
    from mizzen.checkpoint import root_view

    writer = Checkpointer(tmp_path, attempt=1, keep=1)
    writer.save(1, {"a": 1})
    real, real_verify, real_stream = reading.fetch_part, reading.verify_part, root_view.stream
    last = 3

    def behind(step: int) -> None:
        if step < last:
            writer.save(step + 1, {"a": step + 1})

    def fetch(store: Any, part: Any) -> Any:
        behind(int(part.key.split("step-")[1][:10]))
        return real(store, part)

    def stream(store: Any, part: Any) -> Any:
        behind(int(part.key.split("step-")[1][:10]))
        return real_stream(store, part)

    def verify(store: Any, part: Any) -> None:
        behind(int(part.key.split("step-")[1][:10]))
        real_verify(store, part)

    monkeypatch.setattr(reading, "fetch_part", fetch)
    monkeypatch.setattr(reading, "verify_part", verify)
    monkeypatch.setattr(root_view, "stream", stream)
    reader = Checkpointer(tmp_path, attempt=1, settings=CheckpointSettings(rank=1, world_size=2))
    found = reader.load_latest()
    assert found is not None and found.state == {"a": 3}
    assert reader.skipped == ()
    writer.save(1, {"a": 1})
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [3]
    last = 100
    with pytest.raises(CheckpointError, match="removed faster than they could be read"):
        reader.load_latest()
    with pytest.raises(CheckpointError, match="removed faster than they could be read"):
        list_committed(tmp_path, verify=True)


def test_should_save_goes_by_the_interval(tmp_path: Path) -> None:
    """A save is due once the interval has passed since the start or the last save, and not twice at the same step."""
    checkpointer = Checkpointer(tmp_path, interval_s=0.05)
    assert checkpointer.load_latest() is None
    step = 0

    def due() -> int:
        nonlocal step
        while not checkpointer.should_save(step := step + 1):
            time.sleep(0.001)
        return step

    began_s = time.monotonic()
    checkpointer.save(due(), {"a": 1})
    assert time.monotonic() - began_s > 0.03
    assert not checkpointer.should_save(step)
    began_s = time.monotonic()
    assert due() and time.monotonic() - began_s > 0.03
