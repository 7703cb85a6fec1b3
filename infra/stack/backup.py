"""Writes and reads backups of an installation: the database, the settings, and optionally its keys.

A backup is a ZIP archive. Its last member, the manifest, has the SHA-256 of each other member, so a backup that is
damaged or incomplete is recognised before anything is restored.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from domain.version import VERSION
from infra.bootstrap import OPERATOR_KEY_FILE
from infra.config.settings import Settings, load_settings
from infra.db.migrate import current
from infra.db.session import open_engine
from infra.errors import ConfigurationError, StackError
from infra.stack.database import client_command
from infra.stack.embedded import PAYLOAD_KEYS
from infra.stack.postgres import EmbeddedPostgres

DUMP, SETTINGS_FILE, FLEET_FILE, MASTER_KEY_FILE = "database.sql", "settings.yaml", "fleet.yaml", "master.key"
KEY_FILES = (MASTER_KEY_FILE, PAYLOAD_KEYS, OPERATOR_KEY_FILE)
MACHINE_KEY_FILE = re.compile(r"machines/[a-z0-9-]+(\.[a-z0-9-]+)+/key(\.previous)?")
"""The key of a machine of `mizzen up`. The database has the public part, and another key is not trusted."""
_MANIFEST = "manifest.json"
_FORM = 1
_CHUNK = 1 << 20
_NOT_DUMPED = ("console_session", "task_session")
"""Tables whose rows are not in a backup: logins of browsers, and open sessions in tasks."""


class BackupManifest(BaseModel):
    """The contents of a backup, and the version that has made it."""

    model_config = ConfigDict(extra="forbid")
    form: int
    """The version of the archive format."""
    version: str
    """The version of mizzen."""
    revision: str
    """The revision of the database's schema."""
    made_at: datetime
    """The time before which every acknowledged change is in the backup."""
    sha256: dict[str, str]
    """SHA-256 of each other member, in hexadecimal digits."""


def make_backup(settings: Settings, database_url: str, file: Path, *, with_keys: bool) -> BackupManifest:
    """Writes a backup to `file`, which only its owner can read. It is complete, or `file` does not exist.

    Args:
        settings: the settings of the installation.
        database_url: its database, which may be in use. The backup has one consistent state of it.
        file: must not exist.
        with_keys: whether the keys and passwords of the installation are in the backup.

    Raises:
        ConfigurationError: `file` exists, a key is missing, or the database belongs to another version.
        StackError: the database cannot be read, or `file` cannot be written.
    """
    if file.exists():
        raise ConfigurationError(f"{file}: exists already; a backup needs a new file")
    keys = _key_files(settings) if with_keys else {}
    try:
        # mkstemp gives the file mode 0600.
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise StackError(f"{file}: {error.strerror}") from None
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            manifest = _write(settings, database_url, out, keys, with_secrets=with_keys)
            out.flush()
            os.fsync(out.fileno())
        os.link(draft, file)  # Unlike a rename, it fails if the file exists.
    except FileExistsError:
        raise ConfigurationError(f"{file}: exists already; a backup needs a new file") from None
    except OSError as error:
        raise StackError(f"{file}: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
    return manifest


def _key_files(settings: Settings) -> dict[str, Path]:
    """Returns the paths of the installation's keys by their name in a backup.

    Raises:
        ConfigurationError: the master key is missing.
    """
    payload_keys = settings.temporal.payload_keys or settings.data_dir / PAYLOAD_KEYS
    paths = (settings.master_key_path, payload_keys, settings.data_dir / OPERATOR_KEY_FILE)
    if not paths[0].exists():
        raise ConfigurationError(f"--keys: {paths[0]} is missing; set master_key, or leave --keys out")
    found = {name: path for name, path in zip(KEY_FILES, paths, strict=True) if path.exists()}
    machines = {str(path.relative_to(settings.data_dir)): path for path in settings.data_dir.glob("machines/*/key*")}
    return found | {name: path for name, path in sorted(machines.items()) if MACHINE_KEY_FILE.fullmatch(name)}


def _write(
    settings: Settings, database_url: str, out: IO[bytes], keys: Mapping[str, Path], *, with_secrets: bool
) -> BackupManifest:
    engine = open_engine(database_url, pool_size=1)
    try:
        revision = current(engine)
    finally:
        engine.dispose()
    if revision is None:
        raise ConfigurationError("database: has no schema of mizzen; nothing to back up")
    made_at, sha256 = datetime.now(UTC), dict[str, str]()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:

        @contextlib.contextmanager
        def member(name: str) -> Iterator["_Hashing"]:
            with archive.open(name, "w", force_zip64=True) as stream:
                yield (hashing := _Hashing(stream))
            sha256[name] = hashing.sha256.hexdigest()

        with member(DUMP) as dump:
            _dump(database_url, dump)
        with member(SETTINGS_FILE) as text:
            text.write(yaml.safe_dump(_portable(settings, with_secrets=with_secrets)).encode())
        files = dict(keys) if settings.fleet is None else {**keys, FLEET_FILE: settings.fleet}
        for name, path in files.items():
            with member(name) as text:
                text.write(path.read_bytes())
        manifest = BackupManifest(form=_FORM, version=VERSION, revision=revision, made_at=made_at, sha256=sha256)
        archive.writestr(_MANIFEST, manifest.model_dump_json())
    return manifest


class _Hashing:
    """File wrapper that computes the SHA-256 of all written bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.sha256.update(data)
        self._stream.write(data)


def _dump(database_url: str, out: _Hashing) -> None:
    """Writes SQL that creates the database's content in one consistent state.

    Raises:
        StackError: the database cannot be read.
    """
    command, environment = client_command(EmbeddedPostgres(Path()).program("pg_dump"), database_url)
    command += ["--no-owner", "--no-privileges", "--no-unlogged-table-data"]
    command += [f"--exclude-table-data={table}" for table in _NOT_DUMPED]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said) as process:
            assert process.stdout is not None
            while chunk := process.stdout.read(_CHUNK):
                out.write(chunk)
        if process.returncode != 0:
            said.seek(0)
            raise StackError(f"database: {said.read().decode(errors='replace').strip()}")


def _portable(settings: Settings, *, with_secrets: bool) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, without settings that are specific to this computer."""
    local: dict[str, Any] = {"data_dir": True, "fleet": True, "database": True, "master_key": True}
    local["temporal"] = {"ui_socket", "payload_keys"} | (set() if with_secrets else {"api_key"})
    local["api"] = {"one_tenant"}
    if settings.temporal.ui_socket is not None:  # The embedded Temporal.
        local["temporal"].add("address")
    found = settings.model_dump(mode="json", exclude_defaults=True, exclude=local)
    return {name: value for name, value in found.items() if value != {}}


def settings_of(folder: Path) -> Settings:
    """Returns the settings with which `mizzen up` runs, or last ran, on a data folder.

    Raises:
        ConfigurationError: `mizzen up` never ran on this folder.
    """
    file = folder / "run" / "settings.yaml"
    if not file.exists():
        raise ConfigurationError(f"data_dir: {folder} is not the folder of a `mizzen up`: {file} is missing")
    fleet = folder / "run" / "fleet.yaml"
    own: dict[str, Any] = {"data_dir": folder, "fleet": fleet if fleet.exists() else None}
    if (folder / "postgres").exists():
        own["database"] = None
    return load_settings(file).model_copy(update=own)


@contextlib.contextmanager
def opened_backup(file: Path) -> Iterator[tuple[BackupManifest, zipfile.ZipFile]]:
    """Opens a backup of this version whose members are complete.

    Raises:
        ConfigurationError: the file cannot be read, is damaged or incomplete, or another version has made it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = _checked(file, archive)
            yield manifest, archive
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror or error}") from None
    except zipfile.BadZipFile as error:
        raise ConfigurationError(f"{file}: is not a whole backup of mizzen: {error}; nothing was changed") from None


def _checked(file: Path, archive: zipfile.ZipFile) -> BackupManifest:
    try:
        body = json.loads(archive.read(_MANIFEST))
        for name, ours in (("form", _FORM), ("version", VERSION)):
            if isinstance(body, dict) and (made_by := body.get(name)) != ours:
                raise ConfigurationError(
                    f"{file}: was made by another version of mizzen ({name} {made_by!r}; this one has {ours!r});"
                    f" nothing was changed. Restore it with version {body.get('version')}, then upgrade"
                )
        manifest = BackupManifest.model_validate(body)
        for name, sha256 in manifest.sha256.items():
            with archive.open(name) as member:
                if _sha256_of(member) != sha256:
                    raise zipfile.BadZipFile(f"{name} has another checksum")
    # zipfile raises NotImplementedError for an unknown compression, and RuntimeError for an encrypted member.
    except (KeyError, ValueError, ValidationError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise zipfile.BadZipFile(str(error)) from None
    if DUMP not in manifest.sha256:
        raise zipfile.BadZipFile(f"{DUMP} is missing")
    return manifest


def _sha256_of(member: IO[bytes]) -> str:
    sha256 = hashlib.sha256()
    while chunk := member.read(_CHUNK):
        sha256.update(chunk)
    return sha256.hexdigest()
