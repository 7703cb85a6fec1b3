"""Backups: what is in them, what is refused, and that a restored database is held."""

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from sqlalchemy import Engine, select, text

from infra.bootstrap import bootstrap
from infra.config.services import TemporalSettings
from infra.config.settings import Settings
from infra.db import events, restored_databases
from infra.db.logs import Audit
from infra.db.session import open_engine, transaction
from infra.db.tenants import Tenant
from infra.errors import ConfigurationError, StackError
from infra.stack.backup import make_backup
from infra.stack.restore import restore_backup
from tests.databases import Databases


@pytest.fixture
def settings(tmp_path: Path, database: Engine) -> Settings:
    """The settings of an installation on the test's database, which has a tenant and events."""
    folder = tmp_path / "data"
    folder.mkdir()
    bootstrap(database, folder, folder / "master.key", {"east": "file:///buckets/east"})
    with transaction(database) as session:
        session.add(Tenant(name="vision", level=3))
        events.record(session, "stack.restarted", detail={"n": 1})
    with transaction(database) as session:
        events.record(session, "stack.restarted", detail={"n": 2})
    (folder / "machines" / "east.a.m-1").mkdir(parents=True)
    (folder / "machines" / "east.a.m-1" / "key").write_bytes(b"\x00\xff" * 16)
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("version: 1\nregions: []\n")
    temporal = TemporalSettings(address="temporal:7233", api_key="hidden")
    return Settings(data_dir=folder, fleet=fleet, temporal=temporal)


def _dumped(database_url: str, query: str) -> list[object]:
    engine = open_engine(database_url, pool_size=1)
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]
    finally:
        engine.dispose()


@pytest.fixture
def empty_url(databases: Databases, postgres_url: str) -> str:
    """The URL of a database without tables."""
    return databases.create("template0")


def test_a_backup_is_restored_into_an_empty_database_and_is_held(
    settings: Settings, database_url: str, empty_url: str, tmp_path: Path
) -> None:
    """Rows, keys and settings return, and git ignores them. Readers of the log continue; `adopt` ends the hold once."""
    file, to = tmp_path / "b.zip", tmp_path / "restored"
    old_umask = os.umask(0)
    try:
        make_backup(settings, database_url, file, with_keys=True)
        restore_backup(file, to, empty_url)
    finally:
        os.umask(old_umask)
    ignored = to / ".gitignore"
    assert ignored.read_text() == "*\n"
    private = [file, *(path for path in to.rglob("*") if path.is_file() and path != ignored)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    for name in ("master.key", "operator.key", "machines/east.a.m-1/key"):
        assert (to / name).read_bytes() == (settings.data_dir / name).read_bytes()
    restored = yaml.safe_load((to / "settings.yaml").read_text())
    assert restored["temporal"] == {"address": "temporal:7233", "api_key": "hidden"}
    assert restored["data_dir"] == str(to) and Path(restored["fleet"]).read_text() == "version: 1\nregions: []\n"
    tables = "select name from tenant union select name from region union select id from api_key order by 1"
    assert _dumped(empty_url, tables) == _dumped(database_url, tables)

    engine = open_engine(empty_url)
    with transaction(engine) as session:
        read = events.read_after(session, events.Cursor())
        assert [event.detail.get("n") for event in read if event.kind == "stack.restarted"] == [1, 2]
        events.record(session, "stack.restarted", detail={"n": 3})
    with transaction(engine) as session:
        # A position of the original, whose transactions had larger numbers.
        later = events.resumed(session, events.Cursor(1 << 40, read[-1].id))
        assert [event.detail for event in events.read_after(session, later)] == [{"n": 3}]
        assert restored_databases.held_since(session) is not None
    with transaction(engine) as session:
        assert restored_databases.adopt(session) is not None
    with transaction(engine) as session:
        assert restored_databases.held_since(session) is None and restored_databases.adopt(session) is None
        assert session.scalars(select(Audit.action).where(Audit.action == "installation.adopt")).all() != []
    engine.dispose()


def test_a_backup_without_keys_has_no_secret(settings: Settings, database_url: str, tmp_path: Path) -> None:
    """Without --keys the archive has no key, and no password of the settings."""
    file = tmp_path / "b.zip"
    make_backup(settings, database_url, file, with_keys=False)
    with zipfile.ZipFile(file) as archive:
        assert set(archive.namelist()) == {"database.sql", "settings.yaml", "fleet.yaml", "manifest.json"}
        content = b"".join(archive.read(name) for name in archive.namelist())
    for secret in ((settings.data_dir / name).read_bytes().strip() for name in ("master.key", "operator.key")):
        assert secret not in content
    assert b"hidden" not in content


def _rewrite(file: Path, **manifest: object) -> None:
    """Gives a backup SQL that fails at its end, with the right checksum, and other values of its manifest."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["database.sql"] += b"select 1 / 0;"
    body = json.loads(members["manifest.json"])
    body["sha256"]["database.sql"] = hashlib.sha256(members["database.sql"]).hexdigest()
    members["manifest.json"] = json.dumps({**body, **manifest}).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _flip(at: Callable[[int], int]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at(len(content))] ^= 0x40
        file.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (partial(_rewrite, version="9.9.9"), r"another version of mizzen \(version '9.9.9'; this one has '0"),
        (_flip(lambda size: size // 3), "is not a whole backup"),
        (_flip(lambda size: 200), "is not a whole backup"),
        (lambda file: os.truncate(file, file.stat().st_size // 2), "is not a whole backup"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "is not a whole backup"),
        (lambda file: os.truncate(file, 0), "is not a whole backup"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_what_cannot_be_restored_changes_nothing(
    settings: Settings, database_url: str, empty_url: str, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """A backup that is damaged, incomplete or of another version is refused with the reason."""
    file, to = tmp_path / "b.zip", tmp_path / "restored"
    make_backup(settings, database_url, file, with_keys=True)
    damage(file)
    with pytest.raises(ConfigurationError, match=says):
        restore_backup(file, to, empty_url)
    assert not to.exists() and not list(tmp_path.glob(".*"))
    assert _dumped(empty_url, "select 1 from pg_tables where schemaname = 'public'") == []


def test_only_an_empty_place_takes_a_backup(
    settings: Settings, database_url: str, empty_url: str, tmp_path: Path
) -> None:
    """A database with tables, a folder with files and an existing file are refused, and stay."""
    file, to = tmp_path / "b.zip", tmp_path / "restored"
    make_backup(settings, database_url, file, with_keys=True)
    with pytest.raises(ConfigurationError, match="exists already"):
        make_backup(settings, database_url, file, with_keys=True)
    with pytest.raises(ConfigurationError, match=r"--database: is not empty: it has public\."):
        restore_backup(file, to, database_url)
    with pytest.raises(ConfigurationError, match=r"--data-dir: .* exists and is not empty"):
        restore_backup(file, settings.data_dir, empty_url)
    assert not to.exists() and not list(tmp_path.glob(".*"))


def test_a_failed_restoration_leaves_nothing(
    settings: Settings, database_url: str, empty_url: str, tmp_path: Path
) -> None:
    """SQL that fails after all tables were created leaves neither tables nor a folder."""
    file, to = tmp_path / "b.zip", tmp_path / "restored"
    make_backup(settings, database_url, file, with_keys=False)
    _rewrite(file)
    with pytest.raises(StackError, match=r"nothing was restored: .*division by zero"):
        restore_backup(file, to, empty_url)
    assert not to.exists() and not list(tmp_path.glob(".*"))
    assert _dumped(empty_url, "select 1 from pg_tables where schemaname = 'public'") == []
    with pytest.raises(StackError, match="No such file"):
        make_backup(settings, database_url, tmp_path / "no folder" / "b.zip", with_keys=False)
