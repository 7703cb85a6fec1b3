"""Archives of working directories."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from infra.archives import inspect_archive
from mizzen.client import ArchiveError, pack


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names(body: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return tar.getnames()


def test_the_same_files_give_the_same_bytes_whatever_their_order_times_and_owners(tmp_path: Path) -> None:
    """The archive depends only on the names, contents and execute bits of the files."""
    files = {"train.py": "print(1)", "lib/a.py": "a = 1", "lib/b.py": "b = 2", "zz": ""}
    one = write(tmp_path / "one", files)
    two = write(tmp_path / "two", dict(reversed(files.items())))
    os.utime(two / "train.py", (1, 1))
    (two / "lib/a.py").chmod(0o600)
    assert pack(one) == pack(two)
    (two / "train.py").chmod(0o755)
    assert pack(one).sha256 != pack(two).sha256


def test_ignored_files_are_left_out(tmp_path: Path) -> None:
    """Version control folders, caches and paths that match .mizzenignore are not packed."""
    folder = write(
        tmp_path,
        {
            ".git/config": "",
            ".venv/bin/python": "",
            "pkg/__pycache__/x.pyc": "",
            "pkg/x.py": "",
            "a.pt": "",
            "pkg/b.pt": "",
            "data/big": "",
            "pkg/data/small": "",
            "runs/1": "",
            "pkg/runs": "a file of that name",
            ".mizzenignore": "# comment\n*.pt\ndata/*\n/runs/\n\n",
        },
    )
    packed = [".mizzenignore", "data", "pkg", "pkg/data", "pkg/data/small", "pkg/runs", "pkg/x.py"]
    assert names(pack(folder).body) == packed


def test_patterns_are_those_of_git(tmp_path: Path) -> None:
    """`.gitignore` files count, also nested ones and those above; `.mizzenignore` comes first and may take back."""
    repository = write(
        tmp_path,
        {
            ".git/config": "",
            ".gitignore": "*.log\n/job/build/\n",
            "job/.gitignore": "*.pt\n!best.pt\ndata/\n",
            "job/.mizzenignore": "!keep.log\nnotes\n",
            "job/a.log": "", "job/keep.log": "", "job/a.pt": "", "job/best.pt": "", "job/build/x": "", "job/data/x": "",
            "job/lib/.gitignore": "best.pt\n", "job/lib/best.pt": "", "job/lib/build/x": "", "job/lib/notes": "",
        },
    )  # fmt: skip
    assert names(pack(repository / "job").body) == [
        ".gitignore", ".mizzenignore", "best.pt", "keep.log", "lib", "lib/.gitignore", "lib/build", "lib/build/x",
    ]  # fmt: skip


def test_links_in_the_folder_are_kept(tmp_path: Path) -> None:
    """Relative and absolute links to paths in the folder are links in the archive, and the archive is accepted."""
    folder = write(tmp_path / "job", {"data/x": "1", "lib/y": "2"})
    (folder / "lib" / "near").symlink_to("y")
    (folder / "lib" / "up").symlink_to("../data/x")
    (folder / "all").symlink_to(folder / "data")
    (folder / "chain").symlink_to("all/x")
    (folder / "missing").symlink_to("nothing-here")
    with tarfile.open(fileobj=io.BytesIO(pack(folder).body)) as tar:
        found = {entry.name: entry.linkname for entry in tar if entry.issym()}
    assert found == {
        "lib/near": "y", "lib/up": "../data/x", "all": "data", "chain": "data/x", "missing": "nothing-here",
    }  # fmt: skip
    inspect_archive(io.BytesIO(pack(folder).body), max_bytes=1000, max_members=100)


def test_all_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    """A missing folder, and all links that leave it and special files at once."""
    with pytest.raises(ArchiveError, match="nowhere is not a folder"):
        pack(tmp_path / "nowhere")
    folder = write(tmp_path / "job", {"a": ""})
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "up").symlink_to("../other")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ArchiveError) as caught:
        pack(folder)
    for words in (
        "link is a symbolic link to /etc/passwd, which",
        "up is a symbolic link to ../other",
        "pipe is neither",
    ):
        assert words in str(caught.value)


def test_a_large_folder_names_its_largest_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the size, the limit and what takes the space."""
    monkeypatch.setattr("mizzen.client.archives.MAX_UNPACKED_BYTES", 3 << 20)
    folder = write(
        tmp_path, {"small": "x", "data/one": "x" * (2 << 20), "data/two": "x" * (1 << 20), "big": "x" * (1 << 20)}
    )
    with pytest.raises(
        ArchiveError, match=r"holds 4 MiB, more than 3 MiB; the largest are data/ \(3 MiB\), big \(1 MiB\)"
    ):
        pack(folder)
