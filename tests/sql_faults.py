"""Errors of Postgres on demand: a trigger lets the statements of a table fail with an SQLSTATE."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

TERMINATED = "57P01"
"""A statement with this SQLSTATE ends its own connection, as `pg_terminate_backend` by an operator or a pooler does."""
CLASSES = {
    "22003": "numeric value out of range",
    "23505": "unique violation",
    "23514": "check violation",
    "40001": "serialization failure",
    "40P01": "deadlock detected",
    "53100": "disk full",
    "53200": "out of memory",
    "54000": "program limit exceeded",
    "55P03": "lock not available",
    "57014": "query canceled",
    TERMINATED: "connection ended",
    "58030": "I/O error",
    "P0001": "raised by a function",
    "XX000": "internal error",
}
"""An SQLSTATE of each class that a valid transaction can end with."""


@contextmanager
def failing(
    url: str, table: str, sqlstate: str, *, when: str = "true", skips: int = 0, at_commit: bool = False
) -> Iterator[None]:
    """Lets inserts and updates of a table fail while the block runs.

    Args:
        url: the database, as a role that owns the table.
        table: the table.
        sqlstate: the SQLSTATE of the error.
        when: a condition on the row `new`, as SQL.
        skips: this many rows are written before the first one that fails.
        at_commit: the transaction fails when it commits, instead of the statement.
    """
    begin_failing(url, table, sqlstate, when=when, skips=skips, at_commit=at_commit)
    try:
        yield
    finally:
        end_failing(url, table)


def begin_failing(
    url: str, table: str, sqlstate: str, *, when: str = "true", skips: int = 0, at_commit: bool = False
) -> None:
    """Lets inserts and updates of a table fail, as `failing` does, until `end_failing`."""
    fail = f"raise exception 'injected error' using errcode = '{sqlstate}';"
    if sqlstate == TERMINATED:
        fail = "perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(60);"
    kind, deferred = ("constraint trigger", "deferrable initially deferred") if at_commit else ("trigger", "")
    _run(
        url,
        # A rollback does not change a sequence, so it counts the rows of failed transactions too.
        f"drop sequence if exists fault_rows_{table}",
        f"create sequence fault_rows_{table}",
        f"""create or replace function fault_{table}() returns trigger language plpgsql as $$ begin
            if {when} and nextval('fault_rows_{table}') > {skips} then {fail} end if; return new; end $$""",
        f"drop trigger if exists fault on {table}",
        f"create {kind} fault {'after' if at_commit else 'before'} insert or update on {table} {deferred}"
        f" for each row execute function fault_{table}()",
    )


def end_failing(url: str, table: str) -> None:
    """Ends the errors of a table."""
    _run(
        url,
        f"drop trigger if exists fault on {table}",
        f"drop function if exists fault_{table}",
        f"drop sequence if exists fault_rows_{table}",
    )


def _run(url: str, *statements: str) -> None:
    limits = "-c lock_timeout=3s -c statement_timeout=10s"
    with psycopg.connect(url, connect_timeout=5, options=limits) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]
