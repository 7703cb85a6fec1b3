"""Bringing a database to the newest schema. Alembic owns it; this runs it without an ini file.

Alembic is imported only where there is something to do: every process asks at its start, and it costs a third of a
second.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import ProgrammingError

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER = Path(__file__).parent / "migrations"
_LOCK = 0x6D697A7A656E  # the word in ASCII: two processes that start together migrate one after the other


def head() -> str:
    """The newest revision: revisions are numbered, and their files begin with the number."""
    return max(path.name.partition("_")[0] for path in (_FOLDER / "versions").glob("[0-9]*.py"))


def current(engine: Engine) -> str | None:
    """The revision that the database is at; None for an empty one."""
    try:
        with engine.connect() as connection:
            found = connection.execute(text("select version_num from alembic_version")).scalar()
    except ProgrammingError:
        return None
    return None if found is None else str(found)


def upgrade(engine: Engine) -> None:
    """Brings the database to `head()`. Safe to call from several processes at once."""
    if current(engine) == head():
        return
    with engine.begin() as connection:
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        from alembic import command

        command.upgrade(config(connection), "head")


def config(connection: Connection) -> "Config":
    """Alembic's, for its commands on a connection; what they change is in the connection's transaction."""
    from alembic.config import Config

    found = Config()
    found.set_main_option("script_location", str(_FOLDER))
    found.attributes["connection"] = connection
    return found
