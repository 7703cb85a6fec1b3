"""Copies to a store in a folder."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.copies import open_copy_store
from infra.copies.copy import CopyInUse, copy_object, copy_prefix
from infra.copies.files import FileCopyStore
from tests.objects.copies import PART, Watched, bytes_of, copy
from tests.objects.store_internals import blocks_bytes, raw_names

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> FileCopyStore:
    return FileCopyStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> FileCopyStore:
    return FileCopyStore(tmp_path / "target")


def _sparse(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
        for at in (3 * MIB + 5, size - 10):
            file.seek(at)
            file.write(b"0123456789")


@pytest.mark.parametrize("streamed", [False, True])
def test_holes_stay_holes(streamed: bool, source: FileCopyStore, target: FileCopyStore, tmp_path: Path) -> None:
    """A copy of a sparse file is identical and sparse, copied by the kernel or through this process."""
    _sparse(tmp_path / "source/a/x", 40 * MIB)
    copy_object(Watched(source) if streamed else source, target, "a/x", name="test", part_bytes=MIB)  # type: ignore[arg-type]
    assert (tmp_path / "target/a/x").read_bytes() == (tmp_path / "source/a/x").read_bytes()
    assert blocks_bytes(tmp_path / "target/a/x") <= (4 * MIB if streamed else MIB)


def test_the_kernel_copies(source: FileCopyStore, target: FileCopyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between folders the kernel copies the bytes, unless the file systems do not support it."""
    source.put("a/x", bytes_of(1, 3 * PART))
    reader = Watched(source)
    calls: list[int] = []
    real = os.copy_file_range

    def refused(*args: Any) -> int:
        calls.append(args[2])
        raise OSError(errno.EXDEV, "different file systems")

    monkeypatch.setattr(os, "copy_file_range", lambda *args: (calls.append(args[2]), real(*args))[1])
    assert copy(source, target) == 3 * PART and sum(calls) == 3 * PART
    monkeypatch.setattr(os, "copy_file_range", refused)
    assert copy(source, target, to="b") == 3 * PART
    assert target.get("b") == target.get("a/x") == source.get("a/x")
    assert reader.read_bytes == 0


def test_one_process_at_a_time(source: FileCopyStore, target: FileCopyStore) -> None:
    """A second process cannot run the same copy or tidy its staged files; a copy with another name can run."""
    source.put("a/x", bytes_of(2, 3 * PART))

    def again(done: int, _: int) -> None:
        if done == PART:
            with pytest.raises(CopyInUse, match="a/x: another process is copying it to"):
                copy(source, target)
            target.tidy_uploads(0)
            target.tidy()
            assert copy(source, target, name="another") == 3 * PART

    assert copy(source, target, progress=again) == 3 * PART
    assert raw_names(target) == {"a/x"}


def test_names_are_durable_when_a_copy_has_ended(
    source: FileCopyStore, target: FileCopyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object is fsynced before it gets its name; each folder is fsynced once, after the last rename in it.

    Also if the objects already exist, because an earlier copy may have been killed before it fsynced the folder.
    """
    keys = [f"{folder}/{n}" for folder in ("a", "b/c") for n in range(20)]
    for key in keys:
        source.put(key, bytes_of(5, 100))
    done: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        done.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        real_fsync(descriptor)

    def replace(path: Path, name: Path) -> Path:
        done.append(("name", " ".join(str(one.parent.resolve() / one.name) for one in (path, name))))
        return real_replace(path, name)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    copy_prefix(source, target, "", name="t")
    named = [at for at, (what, _) in enumerate(done) if what == "name"]
    assert len(named) == len(keys)
    for at in named:
        staged, name = done[at][1].split()
        assert ("sync", staged) in done[:at]
        assert done[at:].count(("sync", str(Path(name).parent))) == 1
    synced = done[named[-1] + 1 :]
    assert ("sync", str(tmp_path / "target" / "b")) in synced and ("sync", str(tmp_path / "target")) in synced
    done.clear()
    copy_prefix(source, FileCopyStore(tmp_path / "target"), "", name="t")
    assert done.count(("sync", str(tmp_path / "target" / "a"))) == 1
    assert not [what for what in done if what[0] == "name"]


def test_a_copy_that_was_changed_is_no_copy_any_more(
    source: FileCopyStore, target: FileCopyStore, tmp_path: Path
) -> None:
    """If a copied object is changed later, its mark becomes invalid, and the next copy replaces it."""
    source.put("a/x", bytes_of(3, 3 * PART))
    copy(source, target)
    marked = target.status("a/x")
    assert marked is not None and marked.mark
    with (tmp_path / "target/a/x").open("r+b") as file:
        file.write(b"changed here")
    os.utime(tmp_path / "target/a/x", ns=(0, 0))
    changed = target.status("a/x")
    assert changed is not None and not changed.mark and changed.tag != marked.tag
    assert copy(source, target) == 3 * PART
    assert target.get("a/x") == source.get("a/x")


def test_a_file_system_without_attributes(
    source: FileCopyStore, target: FileCopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without extended attributes, an existing copy is recognised by its content."""

    def none(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOTSUP, "extended attributes are not supported")

    monkeypatch.setattr(os, "setxattr", none)
    monkeypatch.setattr(os, "getxattr", none)
    source.put("a/x", bytes_of(4, 3 * PART))
    assert copy(source, target) == 3 * PART
    found = target.status("a/x")
    assert found is not None and found.mark == ""
    assert copy(source, target) == 0


def test_keys_of_the_stores_own(bucket_of: Callable[[str], str]) -> None:
    """Keys below `.staging` are reserved in every kind of store."""
    for kind in ("file", "s3", "gcs"):
        store = open_copy_store(bucket_of(kind))
        with pytest.raises(ValueError, match=r"'\.staging/x': \.staging is reserved for the store"):
            store.put(".staging/x", b"")
