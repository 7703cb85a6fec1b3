"""The roles of the embedded Postgres: the superuser `postgres`, and `mizzen`, which owns only the database `mizzen`."""

import psycopg
from psycopg import sql

_ROLE, _DATABASE = "mizzen", "mizzen"


def is_wrong_password(error: psycopg.OperationalError) -> bool:
    """Whether the server rejected the role's password, or the role does not exist."""
    return "password authentication failed" in str(error)


def settle(superuser_url: str, password: str) -> None:
    """Creates the role `mizzen` with `password`, and its database. Idempotent, also after an interruption.

    Raises:
        psycopg.OperationalError: the server does not respond, or rejects the superuser's password.
    """
    with psycopg.connect(superuser_url, autocommit=True, connect_timeout=5) as connection:
        if connection.execute("select 1 from pg_roles where rolname = %s", (_ROLE,)).fetchone() is None:
            connection.execute(f"create role {_ROLE}")
        may = "login nosuperuser nocreatedb nocreaterole noreplication nobypassrls"
        connection.execute(sql.SQL(f"alter role {_ROLE} {may} password {{}}").format(password))
        if connection.execute("select 1 from pg_database where datname = %s", (_DATABASE,)).fetchone() is None:
            connection.execute(f"create database {_DATABASE} owner {_ROLE}")
