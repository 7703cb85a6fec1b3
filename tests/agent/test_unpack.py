"""Working directories: what comes out of an archive, and what is refused."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from agent.unpack import BadArchive, fill_workdir


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for key, value in more.items():
        setattr(info, key, value)
    return info


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return path


def test_an_archive_and_files(tmp_path: Path) -> None:
    """Files and folders come out with their content and executable bit; the specification's files come over them."""
    packed = archive(
        tmp_path / "a.tar.gz",
        member(".", tarfile.DIRTYPE),
        member("./src/train.py", size=10),
        member("run.sh", size=3, mode=0o4777),
        member("empty", tarfile.DIRTYPE),
        member("config.yaml", size=5),
    )
    target = tmp_path / "work"
    fill_workdir(target, packed, {"config.yaml": "lr: 0.1\n", "new/deep.txt": "ü"})
    assert (target / "src" / "train.py").read_bytes() == b"x" * 10
    assert (target / "run.sh").stat().st_mode & 0o7777 == 0o755
    assert (target / "src" / "train.py").stat().st_mode & 0o111 == 0
    assert (target / "empty").is_dir()
    assert (target / "config.yaml").read_text() == "lr: 0.1\n"
    assert (target / "new" / "deep.txt").read_bytes() == "ü".encode()
    (target / "config.yaml").write_text("changed by the task")
    fill_workdir(target, packed, {})
    assert (target / "config.yaml").read_text() == "changed by the task"


@pytest.mark.parametrize(
    "members",
    [
        [member("../evil", size=1)],
        [member("/tmp/evil", size=1)],
        [member("a/../../evil", size=1)],
        [member("../evil", tarfile.DIRTYPE)],
        [member("link", tarfile.SYMTYPE, linkname="/etc/passwd")],
        [member("link", tarfile.SYMTYPE, linkname=".."), member("link/evil", size=1)],
        [member("hard", tarfile.LNKTYPE, linkname="/etc/passwd")],
        [member("null", tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [member("disk", tarfile.BLKTYPE)],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("a", size=1), member("a/b", size=1)],
        [member("a", tarfile.DIRTYPE), member("a", size=1)],
        [member("n" * 300, size=1)],
        [member("big", size=600), member("bigger", size=600)],
        [member(f"m{n}") for n in range(30)],
    ],
    ids=lambda members: f"{len(members)} of {members[0].name[:12]}",
)
def test_what_an_archive_may_not_hold(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    """Escapes, links, devices, collisions and too much are refused, and nothing is left, inside or outside."""
    packed = archive(tmp_path / "a.tar.gz", *members)
    target = tmp_path / "root" / "work"
    target.parent.mkdir()
    with pytest.raises(BadArchive):
        fill_workdir(target, packed, {}, max_bytes=1000, max_members=20)
    assert list(target.parent.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "root"]
    assert not Path("/tmp/evil").exists()


NO_TAR = gzip.compress(b"no tar, but long enough" * 100, mtime=0)


@pytest.mark.parametrize("body", [b"", b"no archive", NO_TAR])
def test_what_is_no_archive(tmp_path: Path, body: bytes) -> None:
    """Anything that is not a tar.gz is refused as such."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(body)
    with pytest.raises(BadArchive, match=r"tar\.gz|header"):
        fill_workdir(tmp_path / "work", path, {})


def test_a_truncated_archive(tmp_path: Path) -> None:
    """An archive that ends in the middle is refused, wherever it was cut."""
    packed = archive(tmp_path / "a.tar.gz", member("a", size=5000), member("b", size=5000)).read_bytes()
    for cut in range(1, len(packed) - 12, 17):
        path = tmp_path / "cut.tar.gz"
        path.write_bytes(packed[:cut])
        with pytest.raises(BadArchive):
            fill_workdir(tmp_path / "work", path, {})


def test_a_header_that_claims_gigabytes(tmp_path: Path) -> None:
    """A forged header cannot make the agent read its size into memory."""
    header = bytearray(member("pax", tarfile.XHDTYPE).tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"%011o\0" % (4 << 30)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(bytes(header) + bytes(10240)))
    with pytest.raises(BadArchive, match="header"):
        fill_workdir(tmp_path / "work", path, {})


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a//b", "", "."])
def test_file_names_of_the_specification(tmp_path: Path, name: str) -> None:
    """Files of the specification cannot leave the folder either."""
    with pytest.raises(BadArchive, match="relative path"):
        fill_workdir(tmp_path / "work", None, {name: "text"})
    assert list(tmp_path.iterdir()) == []
