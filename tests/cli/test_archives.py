"""Archives of working directories."""

import gc
import gzip
import hashlib
import io
import os
import random
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from infra.archives import inspect_archive
from mizzen_client import ArchiveError, Client, pack
from mizzen_client.calls import Calls
from tests.cli.service import DOCUMENT, Service


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
    monkeypatch.setattr("mizzen_client.archives.MAX_UNPACKED_BYTES", 3 << 20)
    folder = write(
        tmp_path, {"small": "x", "data/one": "x" * (2 << 20), "data/two": "x" * (1 << 20), "big": "x" * (1 << 20)}
    )
    with pytest.raises(
        ArchiveError, match=r"holds 4 MiB, more than 3 MiB; the largest are data/ \(3 MiB\), big \(1 MiB\)"
    ):
        pack(folder)


@pytest.mark.rotating
def test_a_change_of_a_file_changes_few_parts(tmp_path: Path) -> None:
    """Parts are gzip files of their own, and their sequence is the archive. Those of other files stay the same."""
    chance = random.Random(7)
    files = {f"src/m{number:03}.py": chance.randbytes(100_000).hex()[:100_000] for number in range(100)}
    folder = write(tmp_path, files)
    (folder / "large").write_bytes(chance.randbytes(20 << 20))
    before = pack(folder)
    assert b"".join(before.read(part.start, part.size_bytes) for part in before.parts) == before.body
    assert hashlib.sha256(before.body).hexdigest() == before.sha256 and len(before.parts) > 6
    for part in before.parts:
        body = before.read(part.start, part.size_bytes)
        assert hashlib.sha256(body).hexdigest() == part.sha256
        gzip.decompress(body)
    (folder / "src" / "m050.py").write_text("changed, and of another size")
    (folder / "src" / "m000-new.py").write_text("new")
    after = pack(folder)
    new = {part.sha256 for part in after.parts} - {part.sha256 for part in before.parts}
    assert 1 <= len(new) <= 3
    inspect_archive(io.BytesIO(after.body), max_bytes=1 << 30, max_members=200)


@pytest.mark.rotating
def test_only_changed_parts_are_sent_again(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that the API has needs no request. One with a new part sends it, and its end."""
    chance = random.Random(8)
    for number in range(4):
        (tmp_path / f"weights{number}").write_bytes(chance.randbytes(2 << 20))
    document = {**DOCUMENT, "name": "parts"}
    sent: list[str] = []
    call = Calls._call

    def counted(client: Calls, method: str, *parts: str, **options: Any) -> Any:
        if parts[:2] == ("archives", "parts"):
            sent.append(parts[2])
        return call(client, method, *parts, **options)

    monkeypatch.setattr(Calls, "_call", counted)
    with Client(service.url, service.keys["vision"]) as client:
        assert client.submit(document, tmp_path)["spec"]["workdir"] == pack(tmp_path).sha256
        assert len(sent) == len(pack(tmp_path).parts)
        sent.clear()
        client.submit(document, tmp_path)
        assert sent == []
        before = {part.sha256 for part in pack(tmp_path).parts}
        (tmp_path / "weights2").write_bytes(b"small")
        client.submit(document, tmp_path)
        assert set(sent) == {part.sha256 for part in pack(tmp_path).parts} - before and len(sent) == 2


@pytest.mark.rotating
def test_an_interrupted_upload_continues(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next submission sends only the parts that the API has not."""
    chance = random.Random(9)
    for number in range(4):
        (tmp_path / f"weights{number}").write_bytes(chance.randbytes(2 << 20))
    document = {**DOCUMENT, "name": "interrupted"}
    sent: list[str] = []
    call = Calls._call

    def breaks_off(client: Calls, method: str, *parts: str, **options: Any) -> Any:
        if parts[:2] == ("archives", "parts"):
            if sent:
                raise KeyboardInterrupt
            sent.append(parts[2])
        return call(client, method, *parts, **options)

    names = [part.sha256 for part in pack(tmp_path).parts]
    with Client(service.url, service.keys["vision"]) as client:
        for found in names[:3]:
            sent.clear()
            monkeypatch.setattr(Calls, "_call", breaks_off)
            with pytest.raises(KeyboardInterrupt):
                client.submit(document, tmp_path)
            assert sent == [found]
        monkeypatch.setattr(Calls, "_call", call)
        assert client.submit(document, tmp_path)["spec"]["workdir"] == pack(tmp_path).sha256


@pytest.mark.long
def test_an_upload_keeps_no_parts_in_memory(service: Service, tmp_path: Path) -> None:
    """Memory does not grow with the archive, even before the garbage collector runs."""
    chance = random.Random(10)
    for number in range(4):
        (tmp_path / f"weights{number}").write_bytes(chance.randbytes(16 << 20))
    packed = pack(tmp_path)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with Client(service.url, service.keys["vision"]) as client:
            client.upload(packed)
        assert tracemalloc.get_traced_memory()[0] < 32 << 20
    finally:
        tracemalloc.stop()
        gc.enable()
