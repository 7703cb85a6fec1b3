"""A process that needs the master key refuses to start if the key does not decrypt the database's secrets."""

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from infra.bootstrap import bootstrap
from infra.db.logs import Audit
from infra.db.session import transaction
from infra.db.tenants import Secret, Tenant
from infra.errors import ConfigurationError
from infra.keys import decrypt_secret, encrypt_secret, load_master_key

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = (["init"], ["worker", "--role", "control"], ["api", "--port", "1"])


@pytest.fixture
def key(database: Engine, tmp_path: Path) -> Path:
    """Returns the key file of an installation that has two secrets."""
    path = tmp_path / "master.key"
    bootstrap(database, tmp_path, path, {})
    box = encrypt_secret(load_master_key(path), "value")
    with transaction(database) as session:
        session.add(Tenant(name="vision", level=3, quota_gpus={}))
        session.flush()
        session.add_all([Secret(tenant="vision", name=name, box=box) for name in ("one", "two")])
    return path


def _start(arguments: list[str], database_url: str, folder: Path) -> subprocess.Popen[str]:
    config = folder / "config.yaml"
    config.write_text(f"data_dir: {folder}\ndatabase: {database_url}\ntemporal: {{address: '127.0.0.1:1'}}\n")
    command = [sys.executable, "-m", "server", arguments[0], "--config", str(config), *arguments[1:]]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_lost_key_stops_every_process_that_needs_it(key: Path, database_url: str) -> None:
    """No process creates a new key; each error names the file, the secrets and the option that discards them."""
    key.unlink()
    for process in [_start(arguments, database_url, key.parent) for arguments in PROCESSES]:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2, said
        error = said.strip().splitlines()[-1]
        assert str(key) in error and "2 of the database's secrets (vision/one, vision/two)" in error
        assert "--forget-unreadable-secrets" in error
    assert not key.exists()
    forgetting = _start(["init", "--forget-unreadable-secrets"], database_url, key.parent)
    forgetting.communicate(timeout=120)
    assert forgetting.returncode == 0 and load_master_key(key)


def test_another_key_is_refused_and_forgets_only_what_it_cannot_open(key: Path, database: Engine) -> None:
    """Only secrets that the present key cannot decrypt are deleted, and each deletion is audited."""
    key.unlink()
    load_master_key(key, create=True)
    with transaction(database) as session:
        session.get_one(Secret, ("vision", "two")).box = encrypt_secret(load_master_key(key), "new")
    with pytest.raises(ConfigurationError, match=r"does not decrypt 1 of .*\(vision/one\)"):
        bootstrap(database, key.parent, key, {})
    bootstrap(database, key.parent, key, {}, forget_unreadable_secrets=True)
    with transaction(database) as session:
        (left,) = session.scalars(select(Secret)).all()
        assert (left.name, decrypt_secret(load_master_key(key), left.box)) == ("two", "new")
        deleted = session.scalars(select(Audit.target).where(Audit.action == "secret.delete")).all()
        assert deleted == ["vision/one"]


def test_without_secrets_a_lost_key_is_made_anew(database: Engine, tmp_path: Path) -> None:
    """If the database has no secrets, a missing key is created again."""
    key = tmp_path / "master.key"
    bootstrap(database, tmp_path, key, {})
    key.unlink()
    bootstrap(database, tmp_path, key, {})
    assert load_master_key(key)
