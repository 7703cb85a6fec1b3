"""Reading a checkpoint root without a claim: listing, verifying and loading, also during a training or read-only."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizzen
from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    CorruptCheckpointError,
    Manifest,
    MissingCheckpointError,
    open_checkpoints,
)
from mizzen.objects.files import FileStore

BIG = np.arange(3_000_000, dtype="f8")
"""An array of 24 MB, which is read in several pieces."""


def trained(root: Any, steps: int = 3, **more: Any) -> Checkpointer:
    """Saves a checkpoint at each step, with one constant part and two that change; returns the checkpointer."""
    checkpointer = Checkpointer(root, attempt=1, keep=steps, **more)
    for step in range(1, steps + 1):
        checkpointer.save(step, {"frozen": BIG, "head": np.full(1000, step, dtype="f4"), "lr": {"rate": 0.1 / step}})
    return checkpointer


def place(root: Path, manifest: Manifest, part: str) -> Path:
    [key] = [one.key for one in manifest.parts if one.name == part]
    return root / key


def flip(path: Path) -> None:
    """Flips a bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]}


def test_any_step_is_loaded_while_the_training_goes_on(tmp_path: Path) -> None:
    """A reader makes no claim, so the training can commit its next save, and the reader can load it."""
    checkpointer = trained(tmp_path)
    found = mizzen.open_checkpoints(tmp_path)
    assert [manifest.step for manifest in found.list()] == [3, 2, 1]
    for step in (1, 2, 3):
        loaded = found.load(step)
        assert loaded.step == step and loaded.manifest == found.get(step)
        assert np.array_equal(loaded.state["frozen"], BIG) and loaded.state["lr"] == {"rate": 0.1 / step}
        assert np.array_equal(loaded.state["head"], np.full(1000, step, dtype="f4"))
    assert found.load().step == 3
    assert found.verify() == found.verify(1) == []
    saved = checkpointer.save(4, {"lr": 0})
    assert found.get() == saved and found.load().state == {"lr": 0}


def test_the_newest_of_a_step_is_taken(tmp_path: Path) -> None:
    """If a step was saved twice, the step number selects the last committed checkpoint; a manifest selects either."""
    old = Checkpointer(tmp_path, attempt=1, keep=9).save(5, {"from": "one"})
    new = Checkpointer(tmp_path, attempt=2, keep=9).save(5, {"from": "two"})
    found = open_checkpoints(tmp_path)
    assert found.get(5) == new and found.load(5).state == {"from": "two"}
    assert found.load(old).state == {"from": "one"} and found.verify(old) == []


def test_nothing_is_created_or_changed(tmp_path: Path, fork: Callable[..., Any]) -> None:
    """All read operations open files read-only and create no folders, so they work on a read-only root."""
    root = tmp_path / "root"
    trained(root)
    before = tree(root)
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)

    def work(tell: Callable[[bytes], None]) -> None:
        def refuse(event: str, arguments: tuple[Any, ...]) -> None:
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            changes = (
                "os.mkdir",
                "os.rename",
                "os.link",
                "os.remove",
                "os.rmdir",
                "os.utime",
                "os.chmod",
                "os.symlink",
            )
            if writes or event in changes:
                tell(f"{event} {arguments}\n".encode())

        sys.addaudithook(refuse)
        found = open_checkpoints(root)
        assert len(found.list()) == len(found.survey()) == len(found.verify_all()) == 3
        assert found.load(2).step == 2 and found.tensors(found.get().parts[0])
        with pytest.raises(MissingCheckpointError):
            open_checkpoints(tmp_path / "none")
        tell(b"done")

    child = fork(work)
    assert (child.said(), child.end()) == (b"done", 0)
    assert tree(root) == before
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        folder.chmod(0o755)


def test_what_is_no_root_is_told(tmp_path: Path) -> None:
    """A missing folder, or one without a checkpoint log, is an error. A claimed root without checkpoints is empty."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.pt").write_bytes(b"x")
    for name in ("nowhere", "other", "other/model.pt"):
        with pytest.raises(MissingCheckpointError, match=f"{name}: not a checkpoint root"):
            open_checkpoints(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model.pt", "other"]
    Checkpointer(tmp_path / "claimed", attempt=1)
    found = open_checkpoints(tmp_path / "claimed")
    assert found.list() == found.survey() == found.verify_all() == []
    for use in (found.get, found.load, found.verify):
        with pytest.raises(MissingCheckpointError, match="the root has no committed checkpoint"):
            use()
    with pytest.raises(ValueError, match="the scheme 'az' is not supported"):
        open_checkpoints("az://bucket/run")


def test_an_unknown_step_names_those_that_there_are(tmp_path: Path) -> None:
    """The error for a step that was not saved lists the available steps."""
    trained(tmp_path)
    found = open_checkpoints(tmp_path)
    for use in (found.get, found.load, found.verify):
        with pytest.raises(MissingCheckpointError, match="no checkpoint of step 7; available steps: 1, 2, 3"):
            use(7)


def test_each_damage_is_named(tmp_path: Path) -> None:
    """For each missing, truncated or changed part, a problem gives its name, its key and the kind of damage."""
    trained(tmp_path)
    found = open_checkpoints(tmp_path)
    newest, middle, oldest = found.list()
    place(tmp_path, newest, "head").unlink()
    cut = place(tmp_path, middle, "head")
    cut.write_bytes(cut.read_bytes()[:-1])
    flip(place(tmp_path, oldest, "lr"))
    problems = {manifest.step: (manifest, list_) for manifest, list_ in found.verify_all()}
    seen = {step: [(p.part, p.key, p.what) for p in list_] for step, (_, list_) in problems.items()}
    key = {m.step: {part.name: part.key for part in m.parts} for m in (newest, middle, oldest)}
    assert seen == {
        3: [("head", key[3]["head"], "missing")],
        2: [("head", key[2]["head"], "size")],
        1: [("lr", key[1]["lr"], "checksum")],
    }
    for step, (manifest, list_) in problems.items():
        assert found.verify(step) == found.verify(manifest) == list_
        assert all(problem.key in problem.detail for problem in list_)
    by_size = {manifest.step: [problem.what for problem in list_] for manifest, list_ in found.survey()}
    assert by_size == {3: ["missing"], 2: ["size"], 1: []}


def test_a_shared_part_is_read_once_and_damages_all_that_share_it(tmp_path: Path) -> None:
    """`verify_all` reads a shared part once; damage to it is a problem of each checkpoint that shares it."""
    trained(tmp_path)
    found = open_checkpoints(tmp_path)
    read: list[int] = []
    assert all(not problems for _, problems in found.verify_all(progress=read.append))
    contents = {part.key: part.size_bytes for manifest in found.list() for part in manifest.parts}
    assert sum(read) == sum(contents.values())
    flip(place(tmp_path, found.get(), "frozen"))
    assert [[problem.part for problem in problems] for _, problems in found.verify_all()] == [["frozen"]] * 3


def test_a_damaged_checkpoint_is_passed_over_only_where_none_was_asked_for(tmp_path: Path) -> None:
    """Without a step, damaged checkpoints are skipped. A load fails if the given step, or every one, is damaged."""
    trained(tmp_path)
    found = open_checkpoints(tmp_path)
    flip(place(tmp_path, found.get(3), "head"))
    with pytest.warns(CheckpointWarning, match=r"step-0000000003.* is skipped: .*does not match its checksum"):
        assert found.load().step == 2
    with pytest.raises(CorruptCheckpointError, match="does not match its checksum"):
        found.load(3)
    for step in (1, 2):
        flip(place(tmp_path, found.get(step), "head"))
    with pytest.raises(CorruptCheckpointError, match="no checkpoint can be loaded: step-0000000003"):
        found.load()


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    """A damaged record, which may be of the newest checkpoint, is listed, and a load warns about it."""
    trained(tmp_path, steps=2)
    record = max((tmp_path / "log").iterdir())
    record.write_bytes(record.read_bytes()[:-9])
    found = open_checkpoints(tmp_path)
    [damaged] = found.damaged_records(found.get())
    assert damaged.name == f"record {int(record.stem)} of the log"
    with pytest.warns(CheckpointWarning, match="of the log is skipped"):
        assert found.load().step == 1
    record.unlink()
    assert found.list() and found.damaged_records() == ()


def test_a_copy_elsewhere_stands_in(tmp_path: Path) -> None:
    """A damaged part is read from another checkpoint that has the same content."""
    first = Checkpointer(tmp_path, attempt=1, keep=9).save(1, {"same": b"same" * 999})
    checkpointer = Checkpointer(tmp_path, attempt=2, keep=9)
    place(tmp_path, first, "same").rename(tmp_path / "kept")
    second = checkpointer.save(2, {"same": b"same" * 999})
    (tmp_path / "kept").rename(place(tmp_path, first, "same"))
    assert place(tmp_path, first, "same") != place(tmp_path, second, "same")
    flip(place(tmp_path, second, "same"))
    with pytest.warns(CheckpointWarning, match="which has the same content"):
        assert open_checkpoints(tmp_path).load(2).state == {"same": b"same" * 999}


def test_a_rank_loads_its_own_parts(tmp_path: Path, fork: Callable[..., Any]) -> None:
    """The state of any rank of a sharded checkpoint can be loaded without the gang; an unknown rank is an error."""

    def rank(number: int) -> Callable[[Callable[[bytes], None]], None]:
        def work(_: Callable[[bytes], None]) -> None:
            gang = CheckpointSettings(rank=number, world_size=2, sharded=True)
            Checkpointer(tmp_path, attempt=1, settings=gang).save(1, {"model": b"all", "mine": number}, own={"mine"})

        return work

    children = [fork(rank(number)) for number in (0, 1)]
    assert [child.end() for child in children] == [0, 0]
    found = open_checkpoints(tmp_path)
    for number in (0, 1):
        assert found.load(rank=number).state == {"model": b"all", "mine": number}
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={bad}: step-0000000001.* was saved by ranks 0 to 1"):
            found.load(1, bad)
    [mine] = [part for part in found.get().parts if part.rank == 1]
    flip(tmp_path / mine.key)
    assert [(problem.part, problem.rank) for problem in found.verify()] == [("mine", 1)]


def test_tensors_are_listed_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, types and shapes of tensors are read from the header only; an invalid header is an error."""
    state = {"model": {"a": np.zeros((2, 3), "f4"), "b": [np.zeros((), "i8"), BIG]}, "step": 3}
    manifest = Checkpointer(tmp_path).save(1, state)
    found = open_checkpoints(tmp_path)
    read: list[int] = []
    plain = FileStore.get_range

    def counted(store: FileStore, key: str, start: int, end: int) -> bytes:
        content = plain(store, key, start, end)
        read.append(len(content))
        return content

    monkeypatch.setattr(FileStore, "get_range", counted)
    tensors = {part.name: found.tensors(part) for part in manifest.parts}
    assert {(t.name, t.dtype, tuple(t.shape), t.size_bytes) for t in tensors["model"]} == {
        ("a", "F32", (2, 3), 24), ("b/0", "I64", (), 8), ("b/1", "F64", BIG.shape, BIG.nbytes)
    }  # fmt: skip
    assert tensors["step"] == [] and sum(read) < 4096
    [model] = [part for part in manifest.parts if part.name == "model"]
    for content in (b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x40" + b"\0" * 7 + b"{"):
        (tmp_path / model.key).write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=model.key):
            found.tensors(model)


def test_what_a_training_removes_meanwhile_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that retention removes during a read is not reported as damaged, but as removed."""
    checkpointer = Checkpointer(tmp_path, attempt=1, keep=1)
    first = checkpointer.save(1, {"a": 1})
    found = open_checkpoints(tmp_path)
    plain = FileStore.size
    last = 3

    def behind(store: FileStore, key: str) -> int | None:
        monkeypatch.setattr(FileStore, "size", plain)
        newest = found.get().step
        if newest < last:
            checkpointer.save(newest + 1, {"a": newest + 1})
        monkeypatch.setattr(FileStore, "size", behind)
        return plain(store, key)

    monkeypatch.setattr(FileStore, "size", behind)
    assert found.verify() == [] and found.get().step == 3
    with pytest.raises(MissingCheckpointError, match=r"step-0000000001.* was removed while it was read"):
        found.verify(first)
    with pytest.raises(MissingCheckpointError, match=r"step-0000000001.* was removed while it was read"):
        found.load(first)
    last = 100
    with pytest.raises(CheckpointError, match="removed faster than they could be read"):
        found.verify()
    assert found.verify_all() == []


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_object_stores(kind: str, request: pytest.FixtureRequest) -> None:
    """On S3 and Google Cloud Storage, listing, verifying and loading give the same results."""
    root: str = request.getfixturevalue(f"{kind}_url")
    with pytest.raises(MissingCheckpointError):
        open_checkpoints(root)
    trained(root, steps=2)
    found = open_checkpoints(root)
    assert [manifest.step for manifest in found.list()] == [2, 1] and found.verify_all() == [
        (manifest, []) for manifest in found.list()
    ]
    assert np.array_equal(found.load(1).state["frozen"], BIG)
    [head] = [part for part in found.get().parts if part.name == "head"]
    assert [tuple(tensor.shape) for tensor in found.tensors(head)] == [(1000,)]
    found.store.put(head.key, found.store.get(head.key)[:-1] + b"\x7f")
    assert [(problem.part, problem.what) for problem in found.verify()] == [("head", "checksum")]
    found.store.delete(head.key)
    assert [(problem.part, problem.what) for problem in found.verify()] == [("head", "missing")]


def test_a_store_that_does_not_answer_is_an_error_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store fails, the error is not reported as damage."""
    trained(tmp_path)
    found = open_checkpoints(tmp_path)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FileStore, "size", refused)
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        found.verify()
    assert not isinstance(caught.value, CorruptCheckpointError)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(MissingCheckpointError):
        found.get()
