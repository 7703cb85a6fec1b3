"""The database of an installation for commands that run beside it: backup, restore and adoption."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from infra.config.settings import Settings
from infra.errors import ConfigurationError, StackError
from infra.stack.lock import data_folder
from infra.stack.postgres import EmbeddedPostgres

_STOPS_S = 30.0


@contextlib.contextmanager
def database_of(settings: Settings) -> Iterator[str]:
    """Yields the URL of an installation's database. The embedded Postgres is started for the block if it is stopped.

    Raises:
        ConfigurationError: no database is set, and the data folder has none.
        StackError: the embedded Postgres cannot be started.
    """
    if settings.database is not None:
        yield settings.database
        return
    server = EmbeddedPostgres(settings.data_dir / "postgres")
    if not server.exists():
        raise ConfigurationError(
            f"data_dir: {settings.data_dir} has no database; give the --data-dir of `mizzen up`, or --database"
        )
    if _answers(server):
        yield server.url
        return
    with data_folder(settings.data_dir), served(server) as url:
        yield url


@contextlib.contextmanager
def served(server: EmbeddedPostgres) -> Iterator[str]:
    """Runs an embedded Postgres, which is created if it is missing, and yields the URL of its database.

    Raises:
        StackError: it cannot be created or started.
    """
    server.clear_leftover()
    server.initialise()
    process = subprocess.Popen(
        server.command(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        server.wait_ready(process)
        yield server.url
    finally:
        process.send_signal(2)  # SIGINT: Postgres's fast shutdown.
        try:
            process.wait(_STOPS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(server: EmbeddedPostgres) -> bool:
    try:
        psycopg.connect(server.url, connect_timeout=5).close()
    except (psycopg.OperationalError, StackError):
        return False
    return True


def client_command(program: Path, url: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command line and the environment of a program of Postgres that connects to `url`.

    The password is in the environment, because every user can read command lines.

    Raises:
        ConfigurationError: `url` is not a Postgres URL.
    """
    try:
        parts = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(f"database: {str(error).strip()}; must be a postgresql:// URL") from None
    password = parts.pop("password", None)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    if password is not None:
        environment["PGPASSWORD"] = password
    return [str(program), "--dbname", make_conninfo(**parts)], environment
