"""Creates or migrates a database's schema. Migrations run with Alembic, without an ini file.

Alembic is imported only if a migration is needed, because the import takes a third of a second and every process checks
the schema at its start.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import ProgrammingError

from infra.errors import ConfigurationError

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER = Path(__file__).parent / "migrations"
_LOCK = 0x6D697A7A656E  # "mizzen" in ASCII: key of the advisory lock under which processes migrate one after the other


def head() -> str:
    """Returns the newest revision."""
    return _revisions()[-1]


def _revisions() -> list[str]:
    """Returns all revisions in order, from the numbers at the start of the migrations' file names."""
    return sorted(path.name.partition("_")[0] for path in (_FOLDER / "versions").glob("[0-9]*.py"))


def current(engine: Engine) -> str | None:
    """Returns the database's current revision, or None for an empty database."""
    try:
        with engine.connect() as connection:
            found = connection.execute(text("select version_num from alembic_version")).scalar()
    except ProgrammingError:
        return None
    return None if found is None else str(found)


def refuse_unknown(engine: Engine) -> None:
    """Checks that the database is empty or has a revision that this version can migrate.

    Raises:
        ConfigurationError: the database belongs to another version.
    """
    revision = current(engine)
    if revision is not None and revision not in _revisions():
        raise ConfigurationError(
            f"database: its schema has revision {revision}, which this version of mizzen does not know (it knows"
            f" {_revisions()[0]} to {head()}). The database belongs to a newer version or to one before 0.2.0, and is"
            " left unchanged. Use that version, or start with an empty database"
        )


def upgrade(engine: Engine) -> None:
    """Creates the schema in an empty database, or migrates it to `head()`. Several processes may call it concurrently.

    Migrations change tables only. Functions and triggers are dropped before the first one, and created again from their
    files after the last one.

    Raises:
        ConfigurationError: the database belongs to another version. It is not changed.
    """
    if current(engine) == head():
        return
    with engine.begin() as connection:
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        revision = current(engine)
        if revision == head():
            return
        refuse_unknown(engine)
        from alembic import command

        from infra.db import create

        if revision is None:
            create.create_schema(connection)
            command.stamp(config(connection), "head")
        else:
            create.drop_functions(connection)
            command.upgrade(config(connection), "head")
            create.create_functions(connection)


def config(connection: Connection) -> "Config":
    """Returns Alembic's configuration for commands that run in the connection's transaction."""
    from alembic.config import Config

    found = Config()
    found.set_main_option("script_location", str(_FOLDER))
    found.attributes["connection"] = connection
    return found
