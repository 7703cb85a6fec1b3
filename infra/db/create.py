"""Creates the schema of an empty database: its tables from the models, its functions and triggers from SQL files."""

import re
from pathlib import Path

from sqlalchemy import Connection

from infra.db.schema import SCHEMA

_FOLDER = Path(__file__).parent / "functions"
_COLUMNS = _FOLDER / "columns.sql"
"""SQL file with the functions that columns use. It is run only in an empty database, before the tables are created."""
_DROPPED = re.compile(r"^create (function|type) (\w+)", re.MULTILINE)


def create_schema(connection: Connection) -> None:
    """Creates all types, functions, tables and triggers in the connection's transaction."""
    _execute(connection, _COLUMNS)
    SCHEMA.create_all(connection, checkfirst=False)  # Fails if another program has a table of the same name.
    create_functions(connection)


def create_functions(connection: Connection) -> None:
    """Creates the types, functions and triggers. Those in `columns.sql` must exist already, because tables use them."""
    for path in _files():
        _execute(connection, path)


def drop_functions(connection: Connection) -> None:
    """Drops the types and functions that `create_functions` creates. A trigger is dropped with its function."""
    found = [match for path in _files() for match in _DROPPED.findall(path.read_text())]
    for kind, name in sorted(found):  # Functions before the types of their parameters.
        connection.exec_driver_sql(f"drop {kind} if exists {name} cascade")


def _files() -> list[Path]:
    return [path for path in sorted(_FOLDER.glob("*.sql")) if path != _COLUMNS]


def _execute(connection: Connection, path: Path) -> None:
    connection.exec_driver_sql(path.read_text().replace("%", "%%"))
