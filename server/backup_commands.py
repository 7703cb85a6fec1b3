"""`mizzen backup`, `restore` and `adopt`: added to the SDK's command by entry points."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from server.commands import run_command
from server.options import FILE

if TYPE_CHECKING:
    from infra.config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
_FOLDER = click.Path(path_type=Path, file_okay=False)


def _place_options(command: F) -> F:
    """Adds the options that locate an installation: data folder, settings and database."""
    command = click.option("--database", metavar="URL", help="Its Postgres, if not that of `mizzen up`.")(command)
    command = click.option("--data-dir", type=_FOLDER, help="Its data folder (default: mizzen-data).")(command)
    return click.option("--config", type=FILE, help="YAML file with the installation's settings.")(command)


def _settings_of(config: Path | None, data_dir: Path | None, database: str | None) -> "Settings":
    from infra.config.settings import load_settings
    from infra.stack.backup import settings_of

    settings = load_settings(config, {"data_dir": data_dir, "database": database})
    return settings if settings.database is not None else settings_of(settings.data_dir.absolute())


@click.command()
@click.argument("file", type=FILE)
@_place_options
@click.option(
    "--keys", is_flag=True, help="Include the master key, the keys of payloads, the operator's key and passwords."
)
def backup(file: Path, config: Path | None, data_dir: Path | None, database: str | None, keys: bool) -> None:
    """Write a backup of the installation to FILE, while it runs: Postgres and settings. Buckets are not in it."""

    def work() -> None:
        from infra.stack.backup import make_backup
        from infra.stack.database import database_of

        settings = _settings_of(config, data_dir, database)
        with database_of(settings) as url:
            manifest = make_backup(settings, url, file.absolute(), with_keys=keys)
        click.echo(f"{file}: what was acknowledged until {manifest.made_at:%Y-%m-%d %H:%M:%S} UTC", err=True)
        if not keys:
            click.echo("without keys: keep master.key and payload.keys elsewhere", err=True)

    run_command(work)


@click.command()
@click.argument("file", type=FILE)
@click.option("--data-dir", type=_FOLDER, default=Path("mizzen-data"), show_default=True, help="A new folder.")
@click.option("--database", metavar="URL", envvar="MIZZEN_DATABASE", help="An empty Postgres database of your own.")
def restore(file: Path, data_dir: Path, database: str | None) -> None:
    """Restore a backup into a new folder or an empty database. It is held until `mizzen adopt`."""

    def work() -> None:
        from infra.stack.backup import SETTINGS_FILE
        from infra.stack.restore import restore_backup

        manifest = restore_backup(file, data_dir, database)
        click.echo(f"restored the backup of {manifest.made_at:%Y-%m-%d %H:%M:%S} UTC into {data_dir}", err=True)
        click.echo(f"start it with    mizzen up --config {data_dir / SETTINGS_FILE}", err=True)
        click.echo(f"it is held until mizzen adopt --config {data_dir / SETTINGS_FILE}", err=True)

    run_command(work)


@click.command()
@_place_options
def adopt(config: Path | None, data_dir: Path | None, database: str | None) -> None:
    """Let a restored installation use its machines and launch others. First stop the original installation."""

    def work() -> None:
        from infra.config.settings import load_settings
        from infra.db import restored_databases
        from infra.db.session import open_engine, transaction
        from infra.stack.database import database_of

        settings = load_settings(config, {"data_dir": data_dir, "database": database})
        with database_of(settings) as url:
            engine = open_engine(url, pool_size=1)
            try:
                with transaction(engine) as session:
                    made_at = restored_databases.adopt(session)
            finally:
                engine.dispose()
        click.echo(
            "it is not held" if made_at is None else f"adopted; its backup is of {made_at:%Y-%m-%d %H:%M:%S} UTC"
        )

    run_command(work)
