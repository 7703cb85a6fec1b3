"""Copies of buckets into a task's folders: `mizzen.objects.fetch`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mizzen.objects import open_store
from mizzen.objects.fetch import NothingThere, fetch
from mizzen.objects.s3 import S3Store


@pytest.fixture(params=["s3_url", "gcs_url"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty prefix in a bucket."""
    found: str = request.getfixturevalue(request.param)
    return found


def test_folders_and_objects_are_copied(url: str, tmp_path: Path) -> None:
    """A folder keeps its names; an object gets the name of the target; a second copy replaces what has changed."""
    store = open_store(url)
    store.put("model/config.json", b"{}")
    store.put("model/part/0.bin", b"x" * 100)
    store.put("models", b"not in the folder")
    assert fetch(f"{url}/model", tmp_path / "a/b") == 102
    files = {str(p.relative_to(tmp_path)): p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert files == {"a/b/config.json": b"{}", "a/b/part/0.bin": b"x" * 100}
    assert fetch(f"{url}/model/config.json", tmp_path / "c/own.json") == 2
    assert (tmp_path / "c/own.json").read_bytes() == b"{}"
    store.put("model/config.json", b"[1]")
    assert fetch(f"{url}/model", tmp_path / "a/b") == 103
    assert (tmp_path / "a/b/config.json").read_bytes() == b"[1]"
    with pytest.raises(NothingThere, match="is a folder"):
        fetch(f"{url}/model/config.json", tmp_path / "a")
    with pytest.raises(NothingThere, match="no such object"):
        fetch(f"{url}/mode", tmp_path / "d")


def test_names_stay_within_the_folder(s3_url: str, tmp_path: Path) -> None:
    """An object whose name leads out of the folder is refused with its name, and nothing is copied."""
    store = open_store(f"{s3_url}/data")
    assert isinstance(store, S3Store)
    store.put("good", b"x")
    for key in ("../../out", "/out", "a//b"):
        store._client.put_object(Bucket=store._bucket, Key=f"{store._prefix}{key}", Body=b"x")
        with pytest.raises(ValueError, match=re.escape(repr(key))):
            fetch(f"{s3_url}/data", tmp_path / "in/here")
        store._client.delete_object(Bucket=store._bucket, Key=f"{store._prefix}{key}")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_long_names(s3_url: str, tmp_path: Path) -> None:
    """A name may be as long as file systems allow."""
    open_store(f"{s3_url}/data").put("n" * 255, b"x")
    assert fetch(f"{s3_url}/data", tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


def test_the_command_runs_after_the_copies(s3_url: str, tmp_path: Path) -> None:
    """The command finds the files. If a copy fails, it does not run, and the message names the URL."""
    open_store(s3_url).put("data/a.txt", b"hello")
    base = [sys.executable, "-m", "mizzen.objects.fetch", f"{s3_url}/data", "data"]
    done = subprocess.run([*base, "--", "cat", "data/a.txt"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("hello")
    words = [*base, f"{s3_url}/none", "none", "--", "touch", "ran"]
    failed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1 and f"{s3_url}/none" in failed.stderr
    assert not (tmp_path / "ran").exists()
