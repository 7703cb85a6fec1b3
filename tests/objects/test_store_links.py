"""Symbolic links in the folder of a store, which a task may own: none is followed, whenever it is made."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mizzen.objects import MissingObject, ObjectStore, open_store


def test_links_in_the_folder_are_no_objects(tmp_path: Path) -> None:
    """Symbolic links and pipes in the folder are not listed or followed, so that no access leads out of the bucket."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    root = tmp_path / "bucket"
    store = open_store(f"file://{root}")
    store.put("ours/x", b"1")
    (root / "ours" / "file").symlink_to(outside / "secret")
    (root / "ours" / "folder").symlink_to(outside)
    os.mkfifo(root / "ours" / "pipe")
    assert [info.key for info in store.list("")] == ["ours/x"]
    for key in ("ours/file", "ours/folder/secret", "ours/pipe"):
        with pytest.raises(MissingObject):
            store.get(key)
    with pytest.raises(ValueError, match="symbolic link"):
        store.put("ours/folder/new", b"1")
    store.delete("ours/folder/secret")
    assert [path.name for path in outside.iterdir()] == ["secret"]


_STEPS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("ours/x"),
    "list": lambda store: [info.key for info in store.list("ours/")],
    "put": lambda store: store.put("ours/new", b"2"),
    "create": lambda store: store.create("ours/other", b"3"),
    "delete": lambda store: store.delete("ours/x"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="folders are held by Linux's /proc")
@pytest.mark.parametrize("step", _STEPS)
def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(tmp_path: Path, step: str) -> None:
    """A task exchanges its folder for a link just before the object in it is opened, linked, renamed or deleted."""
    outside, ours, link = tmp_path / "outside", tmp_path / "bucket" / "ours", tmp_path / "bucket" / "link"
    outside.mkdir()
    for name in ("x", "y"):
        (outside / name).write_text("secret")
    store = open_store(f"file://{tmp_path}/bucket")
    store.put("ours/x", b"1")
    link.symlink_to(outside)
    with exchanged_at({"x", "new", "other", "scandir"}, ours, link) as times:
        found = _STEPS[step](store)
    assert len(times) > 0 and link.is_dir() and not link.is_symlink(), "the folder was exchanged"
    assert {path.name: path.read_text() for path in outside.iterdir()} == dict.fromkeys("xy", "secret")
    assert found in (b"1", ["ours/x"], None, True)
    names = {"put": {"x", "new"}, "create": {"x", "other"}, "delete": set[str]()}.get(step, {"x"})
    assert {path.name for path in link.iterdir()} == names


@contextlib.contextmanager
def exchanged_at(names: set[str], folder: Path, link: Path) -> Iterator[list[str]]:
    """Exchanges a folder and a link at the first system call for one of `names`. Gives a list of these calls."""
    exchange = ctypes.CDLL(None).renameat2
    times: list[str] = []
    is_on = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and not times and event in ("open", "os.rename", "os.remove", "os.link", "os.scandir"):
            called = {event.removeprefix("os."), *(Path(str(one)).name for one in arguments)}
            if called & names:
                times.append(event)
                assert exchange(-100, os.fsencode(folder), -100, os.fsencode(link), 2) == 0

    sys.addaudithook(hook)  # It stays for the rest of the process.
    try:
        yield times
    finally:
        is_on = False


def test_a_link_in_place_of_the_stores_own_folder_is_not_followed(tmp_path: Path) -> None:
    """A task may own the whole folder, also that in which puts and copies stage what they write."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / ".staging").symlink_to(tmp_path / "outside")
    store = open_store(f"file://{tmp_path}/bucket")
    with pytest.raises(NotADirectoryError):
        store.put("x", b"1")
    assert list(store.list("")) == []
