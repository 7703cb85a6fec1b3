"""If a placed workload cannot be staged, its reason says why until staging succeeds."""

import base64
from pathlib import Path

import pytest
from nacl.public import PrivateKey
from sqlalchemy import func, select

from domain.protocol.workloads import StageRequest
from infra.db.logs import Event
from infra.db.models import Region
from infra.db.tenants import Archive, Secret
from infra.keys import encrypt_secret, load_master_key
from tests.activities.world import World, job


@pytest.fixture
def region(world: World) -> World:
    """A region with a machine, and an installation with a master key."""
    world.region("r")
    public_key = base64.b64encode(bytes(PrivateKey.generate().public_key)).decode()
    world.machine("r/c/m", 2, public_key=public_key)
    load_master_key(world.settings.master_key_path, create=True)
    return world


def _events(world: World, workload: str) -> int:
    with world.session() as session:
        kind = (Event.workload == workload) & (Event.kind == "workload.staging_failed")
        return session.scalar(select(func.count()).select_from(Event).where(kind)) or 0


def _fails(world: World, workload: str, *words: str) -> None:
    """Fails staging twice, and checks that the reason and one new event give the cause."""
    before = _events(world, workload)
    for _ in range(2):
        with pytest.raises(Exception):  # noqa: B017 - the test checks the reason, not the exception
            world.launch.stage(StageRequest(workload, 1))
    row = world.workload(workload)
    assert row.phase == "placing" and row.reason is not None and row.reason["code"] == "staging_failed"
    for word in ("region r", *words):
        assert word in row.reason["sentence"]
    assert _events(world, workload) == before + 1


def test_secrets_archives_and_buckets(region: World, tmp_path: Path) -> None:
    """A missing or wrong master key, or a missing secret, archive or bucket, is named until it is repaired."""
    path = region.settings.master_key_path
    key = load_master_key(path)

    def set_secret() -> None:
        with region.session() as session:
            session.merge(Secret(tenant="t", name="token", box=encrypt_secret(key, "value")))

    workload = region.submit(job(secrets={"TOKEN": "token"}), workdir="ab" * 32)
    region.tick()
    _fails(region, workload, "no secret token")
    set_secret()
    original = path.read_bytes()
    path.unlink()
    _fails(region, workload, "master_key", str(path))
    load_master_key(path, create=True)
    _fails(region, workload, "cannot decrypt secret token of tenant t")
    path.write_bytes(original)
    _fails(region, workload, f"archive {'ab' * 32} does not exist any more")
    with region.session() as session:
        session.add(Archive(tenant="t", sha256="ab" * 32, body=b"archive", paths=b""))
        url = session.get_one(Region, "r").bucket_url
    (tmp_path / "file").touch()
    region.alter(Region, "r", bucket_url=f"file://{tmp_path}/file/bucket")
    _fails(region, workload, "the bucket of region r")
    region.alter(Region, "r", bucket_url=url)
    region.launch.stage(StageRequest(workload, 1))
    assert region.workload(workload).reason is None


def test_an_attempt_that_is_over_shows_nothing(region: World) -> None:
    """A late staging failure of an attempt that is past staging does not change the workload's reason."""
    workload = region.running(job(secrets={"TOKEN": "token"}))
    before = region.workload(workload).reason
    with pytest.raises(Exception, match="no secret token"):
        region.launch.stage(StageRequest(workload, 1))
    assert region.workload(workload).reason == before and _events(region, workload) == 0
