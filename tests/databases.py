"""Migrated, empty databases on one Postgres server, which tests use one after the other.

Creating and dropping a database costs 80 ms of CPU time, emptying one a tenth of this.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.abc import Query

from infra.db.schema import SCHEMA

DELETE_ROWS: Query = "; ".join(  # type: ignore[assignment]
    f'delete from "{table.name}"' for table in (SCHEMA.tables["allocation"], *reversed(SCHEMA.sorted_tables))
)
"""Statements that delete all rows of a migrated database."""
_END_OTHERS = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)
_CATALOGUES = ("class", "attribute", "constraint", "proc", "trigger", "type")
_DEFINITIONS: Query = "select " + ", ".join(  # type: ignore[assignment]
    f"(select md5(string_agg(xmin::text || ctid::text, ',' order by ctid)) from pg_{name})" for name in _CATALOGUES
)
"""A query whose result changes with every change of a table, a function or a trigger."""


class Databases:
    """The databases of one server. Those that no test uses are kept for the next test."""

    def __init__(self, server_url: str, template: str) -> None:
        """Creates no database.

        Args:
            server_url: the URL of any database of the server, whose user may create databases.
            template: the name of a migrated, empty database.
        """
        self._server_url = server_url
        self._template = template
        self._spare: list[str] = []
        self._definitions: dict[str, object] = {}
        self._connections: dict[str, psycopg.Connection] = {}

    def take(self) -> str:
        """Returns the URL of a migrated, empty database, which the caller gives back."""
        return self._spare.pop() if self._spare else self.create(self._template)

    @contextmanager
    def taken(self) -> Iterator[str]:
        """Yields the URL of a migrated, empty database."""
        url = self.take()
        yield url
        self.give(url)

    def create(self, original: str) -> str:
        """Returns the URL of a new copy of the database `original`, to which no connection may be open."""
        name = f"t_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(f"create database {name} template {original}")  # type: ignore[call-overload]
        return self._server_url.rsplit("/", 1)[0] + f"/{name}"

    def give(self, url: str) -> None:
        """Ends all other connections to a database, and empties it for the next `take`.

        A database whose tables or functions the test has changed is dropped.
        """
        found = self._run(url, _END_OTHERS, _DEFINITIONS)
        if found == self._first_definitions():
            self._run(url, DELETE_ROWS, "select setval(seqrelid, seqstart, false) from pg_sequence")
            self._spare.append(url)
        else:
            self.drop(url)

    def drop(self, url: str) -> None:
        """Drops a database."""
        self.release(url)
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(f"drop database {_name(url)} with (force)")  # type: ignore[call-overload]

    def delete_rows(self, url: str) -> None:
        """Deletes all rows of a database, and leaves its sequences and connections."""
        self._run(url, DELETE_ROWS)

    def release(self, url: str) -> None:
        """Closes the connection to a database that is kept for the next deletion of its rows."""
        if (connection := self._connections.pop(_name(url), None)) is not None:
            connection.close()

    def close(self) -> None:
        """Closes all connections. The databases end with their server."""
        for connection in self._connections.values():
            connection.close()

    def _first_definitions(self) -> object:
        if not self._definitions:
            template = self._server_url.rsplit("/", 1)[0] + f"/{self._template}"
            self._definitions["template"] = self._run(template, _DEFINITIONS)
            self.release(template)
        return self._definitions["template"]

    def _run(self, url: str, *statements: Query) -> object:
        """Returns the first row of the last statement. The connection is kept: a new one reads all catalogues again."""
        connection = self._connections.get(_name(url))
        if connection is not None:
            try:
                return _executed(connection, statements)
            except psycopg.OperationalError:  # The test has ended the connection or the server.
                self.release(url)
        connection = self._connections[_name(url)] = psycopg.connect(url)
        return _executed(connection, statements)


def _name(url: str) -> str:
    return url.rsplit("/", 1)[1]


def _executed(connection: psycopg.Connection, statements: tuple[Query, ...]) -> object:
    with connection.transaction():
        for statement in statements:
            cursor = connection.execute(statement)
        return cursor.fetchone() if cursor.description else None
