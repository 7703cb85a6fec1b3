"""Working directories in parts over the API: which are missing, what is verified, and parts that are deleted."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import delete, select

from api.data.archive_inspection import UploadLimits
from infra.db.tenants import Archive, ArchivePart
from tests.api.world import ApiWorld, make_world
from tests.stored_outputs import tar_of

GZIP = {"content-type": "application/gzip"}


def sha256_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def split(archive: bytes) -> list[bytes]:
    """Returns an archive as two gzip files."""
    return [gzip.compress(archive[:700], mtime=0), gzip.compress(archive[700:], mtime=0)]


async def put(world: ApiWorld, body: bytes, sha256: str | None = None) -> int:
    async with world.client("vision") as client:
        path = f"/v1/archives/parts/{sha256 or sha256_of(body)}"
        return (await client.put(path, content=body, headers=GZIP)).status_code


async def assemble(
    world: ApiWorld, parts: list[bytes], sha256: str | None = None, status: int = 200
) -> dict[str, object]:
    async with world.client("vision") as client:
        path = f"/v1/archives/{sha256 or sha256_of(b''.join(parts))}"
        answer = await client.post(path, json={"parts": [sha256_of(part) for part in parts]})
    assert answer.status_code == status, answer.text
    found: dict[str, object] = answer.json()
    return found


async def test_an_archive_is_made_when_no_part_is_missing(world: ApiWorld) -> None:
    """Then a document may refer to it. The request can be repeated."""
    parts = split(tar_of(**{"train.py": b"print(1)" * 100}))
    names = [sha256_of(part) for part in parts]
    assert await assemble(world, parts) == {"missing": names}
    assert await put(world, parts[1]) == 200
    assert await assemble(world, [*parts, parts[0]]) == {"missing": names[:1]}
    assert await put(world, parts[0]) == 200 and await put(world, parts[0]) == 200
    for _ in range(2):
        assert await assemble(world, parts) == {"missing": []}
    with world.session() as session:
        archive = session.get_one(Archive, ("vision", sha256_of(b"".join(parts))))
    assert (archive.body, archive.parts) == (b"", names)
    async with world.client("vision") as client:
        assert (await client.head(f"/v1/archives/{archive.sha256}")).status_code == 200


async def test_what_is_verified(world: ApiWorld) -> None:
    """The checksum of each part and of the whole, and the content."""
    parts = split(tar_of(**{"train.py": b"print(1)" * 100}))
    assert await put(world, parts[0], "0" * 64) == 422
    bad = [gzip.compress(b"no archive" * 200, mtime=0)]
    for part in (*parts, *bad):
        assert await put(world, part) == 200
    answer = await assemble(world, parts, "0" * 64, status=422)
    assert "the SHA-256 of the parts together is" in str(answer["errors"])
    answer = await assemble(world, bad, status=422)
    assert "the archive cannot be unpacked" in str(answer["errors"])
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w:gz") as tar:
        entry = tarfile.TarInfo("leak")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    assert await put(world, link.getvalue()) == 200
    answer = await assemble(world, [link.getvalue()], status=422)
    assert "is a symbolic link to" in str(answer["errors"])
    with world.session() as session:
        assert not list(session.scalars(select(Archive.sha256).where(Archive.parts.is_not(None))))


async def test_a_part_that_is_deleted_meanwhile_is_missing(world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is not made then, and the client sends the part again."""
    parts = split(tar_of(**{"train.py": b"print(1)" * 100}))
    for part in parts:
        assert await put(world, part) == 200
    inspect = UploadLimits.inspect

    async def slow(limits: UploadLimits, pieces: AsyncIterator[bytes]) -> bytes:
        found = await inspect(limits, pieces)
        with world.session() as session:
            session.execute(delete(ArchivePart).where(ArchivePart.sha256 == sha256_of(parts[1])))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(UploadLimits, "inspect", slow)
        assert await assemble(world, parts) == {"missing": [sha256_of(parts[1])]}
    assert await put(world, parts[1]) == 200
    assert await assemble(world, parts) == {"missing": []}


async def test_limits_of_the_whole(database_url: str, tmp_path: Path) -> None:
    """The size of the parts together, and the space of the tenant."""
    settings = {"api": {"max_workdir_bytes": 1000}, "limits": {"archive_bytes_per_tenant": 5000}}
    with make_world(database_url, tmp_path, **settings) as world:
        parts = [bytes([number]) * 600 for number in range(2)]
        for part in parts:
            assert await put(world, part) == 200
        answer = await assemble(world, parts, status=422)
        assert "would have 1200 bytes or more; at most 1000" in str(answer["errors"])
        assert await put(world, bytes(4000)) == 429
