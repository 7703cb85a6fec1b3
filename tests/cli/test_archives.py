"""Archives of working directories."""

import io
import os
import tarfile
from pathlib import Path

import pytest

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


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    """A missing folder, a symbolic link, a special file and an unsupported pattern are errors that name the path."""
    with pytest.raises(ArchiveError, match="nowhere is not a folder"):
        pack(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(ArchiveError, match="link is a symbolic link"):
        pack(tmp_path)
    (tmp_path / "link").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="pipe is neither a file nor a folder"):
        pack(tmp_path)
    (tmp_path / ".mizzenignore").write_text("*.pt\n!best.pt\n")
    with pytest.raises(ArchiveError, match=r"mizzenignore:2: '!best.pt'"):
        pack(tmp_path)
