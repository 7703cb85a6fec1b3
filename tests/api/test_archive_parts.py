"""Working directories in parts over the API: which are missing, what is verified, and parts that are deleted."""

import asyncio
import gzip
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import delete, select, update

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


async def test_limits(database_url: str, tmp_path: Path) -> None:
    """The size of the parts together, their number, the size of the request, and the space of the tenant.

    In this space, a small part counts as 64 KiB, and each use of a part as 1 KiB.
    """
    settings = {"api": {"max_workdir_bytes": 1000}, "limits": {"archive_bytes_per_tenant": 133 << 10}}
    with make_world(database_url, tmp_path, **settings) as world:
        parts = split(tar_of(**{"train.py": b"print(1)" * 100}))
        for part in parts:
            assert await put(world, part) == 200
        assert await put(world, b"one more") == 429
        assert await put(world, parts[0]) == 200
        assert await assemble(world, parts) == {"missing": []}
        nothing = gzip.compress(b"", mtime=0)
        with world.session() as session:
            session.execute(
                update(ArchivePart).where(ArchivePart.sha256 == sha256_of(parts[0])).values(body=bytes(1001))
            )
        answer = await assemble(world, [parts[0], nothing], status=422)
        assert "would have 1001 bytes or more; at most 1000" in str(answer["errors"])
        assert (await assemble(world, [nothing] * 5001, status=422))["errors"]
        answer = await assemble(world, [nothing] * 40_000, status=413)
        assert answer["type"] == "urn:mizzen:problem:too-large"


async def test_uses_of_parts_need_space(database_url: str, tmp_path: Path) -> None:
    """An archive of many small parts is refused if the references to them exceed the space of the tenant."""
    with make_world(database_url, tmp_path, limits={"archive_bytes_per_tenant": 200 << 10}) as world:
        parts = [gzip.compress(tar_of(a=b"b"), mtime=0), gzip.compress(b"", mtime=0)]
        for part in parts:
            assert await put(world, part) == 200
        assert await assemble(world, parts) == {"missing": []}
        assert "archive_bytes_per_tenant" in str(await assemble(world, [parts[0], *parts[1:] * 100], status=429))
        with world.session() as session:
            assert len(session.scalars(select(Archive).where(Archive.parts.is_not(None))).all()) == 1


async def test_concurrent_uploads_of_the_same_parts(world: ApiWorld) -> None:
    """Clients with the same folder may upload it at the same time; each gets the archive."""
    parts = split(tar_of(**{"train.py": b"print(1)" * 100}))

    async def upload(order: int) -> None:
        for part in parts[::order]:
            assert await put(world, part) == 200
        assert await assemble(world, parts) == {"missing": []}

    await asyncio.gather(*(upload(order) for order in (1, -1, 1, -1)))
    with world.session() as session:
        assert len(session.scalars(select(Archive).where(Archive.parts.is_not(None))).all()) == 1
        assert {part.sha256 for part in session.scalars(select(ArchivePart))} == {sha256_of(part) for part in parts}


async def test_parts_are_those_of_one_tenant(world: ApiWorld) -> None:
    """A tenant cannot use, or find out about, the parts of another one."""
    parts = split(tar_of(**{"train.py": b"secret" * 100}))
    for part in parts:
        assert await put(world, part) == 200
    async with world.client("speech") as client:
        path = f"/v1/archives/{sha256_of(b''.join(parts))}"
        body = {"parts": [sha256_of(part) for part in parts]}
        assert (await client.post(path, json=body)).json() == {"missing": body["parts"]}
        assert (await client.post(f"{path}?tenant=vision", json=body)).status_code == 404
        wrong = await client.put(
            f"/v1/archives/parts/{body['parts'][0]}", content=parts[0], headers={"content-type": "text/plain"}
        )
        assert wrong.status_code == 415
