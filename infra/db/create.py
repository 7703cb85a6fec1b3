"""Creates the schema of an empty database: its tables from the models, its functions and triggers from SQL files."""

from pathlib import Path

from sqlalchemy import Connection

from infra.db.schema import SCHEMA

_FOLDER = Path(__file__).parent / "functions"
_FIRST = "columns.sql"
"""The file that is executed before the tables are created."""


def create_schema(connection: Connection) -> None:
    """Creates all types, functions, tables and triggers in the connection's transaction."""
    _execute(connection, _FOLDER / _FIRST)
    SCHEMA.create_all(connection)
    for path in sorted(_FOLDER.glob("*.sql")):
        if path.name != _FIRST:
            _execute(connection, path)


def _execute(connection: Connection, path: Path) -> None:
    connection.exec_driver_sql(path.read_text().replace("%", "%%"))
