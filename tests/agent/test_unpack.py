"""Working directories: unpacking of archives, and which archives are rejected."""

import gzip
import io
import random
import shutil
import tarfile
from pathlib import Path

import pytest

from agent.unpack import fill_workdir
from infra.archives import ArchiveTree, BadArchive, inspect_archive


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
    """Unpacking keeps content and executable bits; the specification's files overwrite those of the archive."""
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


def test_links_of_an_archive(tmp_path: Path) -> None:
    """Links are made after all else, so that nothing is written through them, and the last member of a path counts."""
    long = "n" * 120
    packed = archive(
        tmp_path / "a.tar.gz",
        member("data/x", size=3),
        member("d/up", tarfile.SYMTYPE, linkname="../data/x"),
        member(long, tarfile.SYMTYPE, linkname=f"data/{long}"),
        member("was-link", tarfile.SYMTYPE, linkname="data/x"),
        member("was-link", size=1),
        member("was-file", size=1),
        member("was-file", tarfile.SYMTYPE, linkname="data/x"),
        member("config", tarfile.SYMTYPE, linkname="data/x"),
    )
    target = tmp_path / "work"
    fill_workdir(target, packed, {"config": "mine"})
    assert (target / "d" / "up").read_bytes() == b"xxx" and (target / "d" / "up").is_symlink()
    assert (target / long).readlink() == Path(f"data/{long}")
    assert not (target / "was-link").is_symlink() and (target / "was-file").readlink() == Path("data/x")
    assert (target / "config").read_text() == "mine" and (target / "data" / "x").read_bytes() == b"xxx"


@pytest.mark.parametrize(
    "members",
    [
        [member("../evil", size=1)],
        [member("/tmp/evil", size=1)],
        [member("a/../../evil", size=1)],
        [member("../evil", tarfile.DIRTYPE)],
        [member("link", tarfile.SYMTYPE, linkname="/etc/passwd")],
        [member("link", tarfile.SYMTYPE, linkname=".."), member("link/evil", size=1)],
        [member("d/link", tarfile.SYMTYPE, linkname="../..")],
        [member("d/link", tarfile.SYMTYPE, linkname="../ok/../../x")],
        [member("link", tarfile.SYMTYPE, linkname="a//b")],
        [member("link", tarfile.SYMTYPE, linkname="")],
        [member("link", tarfile.SYMTYPE, linkname="a"), member("link/evil", size=1)],
        [member("link", tarfile.SYMTYPE, linkname="a"), member("link", tarfile.DIRTYPE)],
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
    """Path escapes, links, devices, collisions and oversized archives are rejected, and no file is left anywhere."""
    packed = archive(tmp_path / "a.tar.gz", *members)
    target = tmp_path / "root" / "work"
    target.parent.mkdir()
    with pytest.raises(BadArchive) as unpacked:
        fill_workdir(target, packed, {}, max_bytes=1000, max_members=20)
    with packed.open("rb") as file, pytest.raises(BadArchive) as inspected:
        inspect_archive(file, max_bytes=1000, max_members=20)
    assert (str(inspected.value), inspected.value.member) == (str(unpacked.value), unpacked.value.member)
    assert list(target.parent.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "root"]
    assert not Path("/tmp/evil").exists()


NO_TAR = gzip.compress(b"no tar, but long enough" * 100, mtime=0)


@pytest.mark.parametrize("body", [b"", b"no archive", NO_TAR])
def test_what_is_no_archive(tmp_path: Path, body: bytes) -> None:
    """A file that is not a tar.gz archive is rejected with an error that says so."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(body)
    with pytest.raises(BadArchive, match=r"tar\.gz|header"):
        fill_workdir(tmp_path / "work", path, {})


def test_a_truncated_archive(tmp_path: Path) -> None:
    """A truncated archive is rejected, wherever it was cut."""
    packed = archive(tmp_path / "a.tar.gz", member("a", size=5000), member("b", size=5000)).read_bytes()
    for cut in range(1, len(packed) - 12, 17):
        path = tmp_path / "cut.tar.gz"
        path.write_bytes(packed[:cut])
        with pytest.raises(BadArchive):
            fill_workdir(tmp_path / "work", path, {})


def test_a_header_that_claims_gigabytes(tmp_path: Path) -> None:
    """A forged header cannot make the agent allocate the declared size."""
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
    """File names in the specification cannot lead outside of the working directory."""
    with pytest.raises(BadArchive, match="relative path"):
        fill_workdir(tmp_path / "work", None, {name: "text"})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- the same at submission and on the machine


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("seed", range(3))
def test_every_tar_format_comes_out_as_tarfile_reads_it(tmp_path: Path, form: int, seed: int) -> None:
    """Random trees with long, odd and nested names are unpacked byte for byte, in every format that Python writes."""
    chance = random.Random(seed)
    names = [
        f"{'d' * chance.randrange(1, 60)}/{n}/{'ü' if form != tarfile.USTAR_FORMAT else 'u'} {n}" for n in range(12)
    ]
    if form != tarfile.USTAR_FORMAT:
        names.append("/".join(["deep" * 20] * 9))
    bodies = {name: chance.randbytes(chance.choice((0, 1, 511, 512, 513, 5000))) for name in names}
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", format=form) as tar:
        for name, body in bodies.items():
            tar.addfile(member(name, size=len(body), mtime=1.5 if form == tarfile.PAX_FORMAT else 1), io.BytesIO(body))
    fill_workdir(tmp_path / "work", path, {})
    found = {
        str(p.relative_to(tmp_path / "work")): p.read_bytes() for p in (tmp_path / "work").rglob("*") if p.is_file()
    }
    assert found == bodies
    with path.open("rb") as file:
        assert inspect_archive(file, max_bytes=1 << 20, max_members=200).files == set(bodies)


@pytest.mark.parametrize("seed", range(40))
def test_inspection_and_unpacking_agree(tmp_path: Path, seed: int) -> None:
    """For any archive and any files written over it, inspection rejects exactly what a machine cannot unpack."""
    chance = random.Random(seed)
    names = ["a", "a/b", "a/b/c", "b", "b/a", "c/c/c", "c", "n" * 255, "n" * 256, "d/" * 500 + "d", "d/" * 520 + "d"]
    weights = [3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1]
    kinds = (tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE)
    picked = chance.choices(names, weights, k=chance.randrange(1, 5))
    packed = archive(tmp_path / "a.tar.gz", *(member(n, chance.choice(kinds)) for n in picked))
    files = dict.fromkeys(chance.choices(names, weights, k=chance.randrange(0, 3)), "text")
    target = tmp_path / "work"
    try:
        with packed.open("rb") as file:
            tree = inspect_archive(file, max_bytes=1000, max_members=2000, files=files)
    except BadArchive as error:
        with pytest.raises(BadArchive, match=f"^{str(error)[:20]}"):
            fill_workdir(target, packed, files)
        assert not target.exists()
    else:
        fill_workdir(target, packed, files)
        there = {str(p.relative_to(target)) for p in target.rglob("*")}
        assert there == tree.files | tree.folders == ArchiveTree.load(tree.dump(), 10).files | tree.folders


def forged(size_field: bytes, kind: bytes = tarfile.REGTYPE, pax: dict[bytes, bytes] | None = None) -> bytes:
    """Returns a tar.gz with one member whose header has a forged size; the `pax` records come before it."""

    def header(name: str, kind: bytes, size: bytes) -> bytes:
        block = bytearray(member(name, kind).tobuf(tarfile.USTAR_FORMAT))
        block[124:136] = size
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)

    out = b""
    if pax is not None:
        records = b""
        for key, value in pax.items():
            length = len(key) + len(value) + 3
            length += len(str(length + len(str(length))))
            records += b"%d %s=%s\n" % (length, key, value)
        out = header("pax", tarfile.XHDTYPE, b"%011o\0" % len(records)) + records.ljust(512, b"\0")
    return gzip.compress(out + header("data", kind, size_field) + bytes(1024))


@pytest.mark.parametrize(
    "body",
    [
        forged(b"%011o\0" % 0, pax={b"size": b"900000000000000000"}),
        forged(b"%011o\0" % 0, pax={b"size": b"-512"}),
        forged(b"%011o\0" % 0, pax={b"size": b"9" * 400}),
        forged(b"\x80\0\0\0\x0c\x7d\x71\x3b\x49\xda\0\0"),
        forged(b"\xff" * 12),
        forged(b"00000000999\0"),
        forged(b"%011o\0" % 0, pax={b"path": b"../evil"}),
        forged(b"%011o\0" % 0, pax={b"GNU.sparse.size": b"9"}),
        forged(b"%011o\0" % (1 << 20), tarfile.GNUTYPE_LONGNAME),
        forged(b"%011o\0" % 0, tarfile.GNUTYPE_SPARSE),
    ],
    ids=lambda body: str(len(body)),
)
def test_headers_that_lie(tmp_path: Path, body: bytes) -> None:
    """An invalid size, path or kind in a header is rejected before any of its data is read or skipped."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(body)
    with pytest.raises(BadArchive):
        fill_workdir(tmp_path / "work", path, {})
    with pytest.raises(BadArchive):
        inspect_archive(io.BytesIO(body), max_bytes=1 << 30, max_members=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz"]


class Counting(io.BytesIO):
    """Counts the bytes that are read from it."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        self.taken += len(found)
        return found


def test_no_more_is_read_than_the_limits_allow() -> None:
    """Of an archive that unpacks to a thousand times its size, only as much is read as the limits allow."""
    huge = gzip.compress(member("zeros", size=64 << 20).tobuf() + bytes(64 << 20), 1)
    tail = gzip.compress(member("small").tobuf() + bytes(64 << 20), 1)
    for body in (huge, tail):
        file = Counting(body)
        with pytest.raises(BadArchive):
            inspect_archive(file, max_bytes=1 << 20, max_members=10)
        assert file.taken < len(body) / 8
    members = gzip.compress(b"".join(member(f"{n}").tobuf() for n in range(9999)) + bytes(1024))
    file = Counting(members)
    with pytest.raises(BadArchive, match="more than 10 "):
        inspect_archive(file, max_bytes=1 << 20, max_members=10)
    assert file.taken < len(members) / 2


def test_files_for_absolute_paths_are_moved_out(tmp_path: Path) -> None:
    """They are where no task can replace them by a link; a path without files is an empty folder."""
    packed = archive(
        tmp_path / "a.tar.gz", member("own", size=1), member(".mounts/a/b/file", size=2), member(".mounts/a/c", size=3)
    )
    (tmp_path / "mounts").mkdir()
    mounted = {path: tmp_path / f"mounts/{n}" for n, path in enumerate(("/a", "/a/b", "/a/c", "/d"))}
    for _ in range(2):  # The second time is after a process that was killed before it had ended.
        fill_workdir(tmp_path / "work", packed, {}, mounted=mounted)
        found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file() and p.suffix == ""}
        assert found == {"work/own", "mounts/1/file", "mounts/2"}
        assert mounted["/d"].is_dir() and not (tmp_path / "work/.mounts").exists()
        shutil.rmtree(tmp_path / "work")


@pytest.mark.parametrize(
    "info",
    [member(".mounts", tarfile.SYMTYPE, linkname="data"), member(".mounts/d", tarfile.SYMTYPE, linkname="../data"),
     member(".mounts", size=1)],
)  # fmt: skip
def test_files_for_absolute_paths_are_no_links(tmp_path: Path, info: tarfile.TarInfo) -> None:
    """A link would show the task another file of the machine."""
    packed = archive(tmp_path / "a.tar.gz", member("data/x", size=3), info)
    (tmp_path / "mounts").mkdir()
    with pytest.raises(BadArchive, match="must be a folder"):
        fill_workdir(tmp_path / "work", packed, {}, mounted={"/d": tmp_path / "mounts/0"})
    assert not (tmp_path / "work").exists()
