"""Restores a backup (`infra.stack.backup`) into an empty place. It is held until an operator adopts it."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import yaml
from sqlalchemy import Engine, text

from infra.db.events import RESTORED_TXID
from infra.db.session import open_engine
from infra.errors import ConfigurationError, StackError
from infra.files import write_private
from infra.stack.backup import (
    DUMP,
    FLEET_FILE,
    KEY_FILES,
    MACHINE_KEY_FILE,
    SETTINGS_FILE,
    BackupManifest,
    opened_backup,
)
from infra.stack.database import client_command, served
from infra.stack.lock import make_closed, make_data_folder
from infra.stack.postgres import EmbeddedPostgres

_OWN = text(
    "select n.nspname || '.' || c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
    " where n.nspname not in ('pg_catalog', 'information_schema') and n.nspname not like 'pg_toast%' limit 1"
)
_AFTER = f"""
-- Postgres numbers its transactions from the start again, and readers follow the order of these numbers.
update public.event set txid = {RESTORED_TXID};
delete from public.publication where name = 'alerts';
insert into public.restoration (made_at) values ('{{made_at}}');
commit;
"""


def restore_backup(file: Path, folder: Path, database_url: str | None = None) -> BackupManifest:
    """Restores a backup into the data folder `folder`, and into the database at `database_url`, or an embedded one.

    All or nothing: if it fails, nothing was changed.

    Raises:
        ConfigurationError: the backup is damaged or of another version, or `folder` or the database is not empty.
        StackError: the database cannot be written.
    """
    folder = folder.absolute()
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ConfigurationError(f"--data-dir: {folder} exists and is not empty; give a new folder")
    with opened_backup(file) as (manifest, archive), _draft_of(folder) as draft:
        if database_url is not None:
            _refuse_content(database_url)
        _write_files(manifest, archive, draft, folder)
        if database_url is None:
            with served(EmbeddedPostgres(draft / "postgres")) as url:
                _load(manifest, archive, url)
            draft.rename(folder)
        else:
            # Reserve the folder first; it is released again if the database refuses the content.
            draft.rename(folder)
            try:
                _load(manifest, archive, database_url)
            except BaseException:
                shutil.rmtree(folder)
                raise
    return manifest


@contextlib.contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`, which is removed at the end unless it was renamed."""
    draft = folder.with_name(f".{folder.name}.restoring-{os.getpid()}")
    try:
        make_data_folder(draft)
        yield draft
    except OSError as error:
        raise StackError(f"--data-dir: {error.filename or folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse_content(database_url: str) -> None:
    engine: Engine = open_engine(database_url, pool_size=1)
    try:
        with engine.connect() as connection:
            found = connection.execute(_OWN).scalar()
    finally:
        engine.dispose()
    if found is not None:
        raise ConfigurationError(f"--database: is not empty: it has {found}; give the URL of an empty database")


def _write_files(manifest: BackupManifest, archive: zipfile.ZipFile, draft: Path, folder: Path) -> None:
    """Writes the settings for the data folder `folder`, the fleet file and the keys into `draft`."""
    settings = yaml.safe_load(archive.read(SETTINGS_FILE)) or {}
    settings["data_dir"] = str(folder)
    for name in manifest.sha256:
        if name in (FLEET_FILE, *KEY_FILES) or MACHINE_KEY_FILE.fullmatch(name):
            for folder_ in reversed(Path(name).parents[:-1]):
                make_closed(draft / folder_)
            write_private(draft / name, archive.read(name))
    if FLEET_FILE in manifest.sha256:
        settings["fleet"] = str(folder / FLEET_FILE)
    write_private(draft / SETTINGS_FILE, yaml.safe_dump(settings))


def _load(manifest: BackupManifest, archive: zipfile.ZipFile, url: str) -> None:
    """Runs the backup's SQL in one transaction, which also holds the database.

    Raises:
        StackError: the database refuses it. It is not changed.
    """
    command, environment = client_command(EmbeddedPostgres(Path()).program("psql"), url)
    command += ["--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--output=/dev/null"]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=said) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), archive.open(DUMP) as dump:
                _feed(process.stdin, dump, _AFTER.format(made_at=manifest.made_at.isoformat()))
        if process.returncode != 0:
            said.seek(0)
            raise StackError(f"database: nothing was restored: {said.read().decode(errors='replace').strip()}")


def _feed(psql: IO[bytes], dump: IO[bytes], after: str) -> None:
    # Without the last statement, `commit`, nothing remains: psql ends, and Postgres rolls back.
    psql.write(b"begin;\n")
    shutil.copyfileobj(dump, psql, 1 << 20)
    psql.write(after.encode())
    psql.close()
