"""The roles of the embedded Postgres: the superuser `postgres`, and `mizzen`, which owns only the database `mizzen`.

Database clusters of earlier versions had one role, the superuser `mizzen`. It is renamed, and a new role `mizzen`
becomes the owner of the database and its objects. Every step is idempotent, so the next start completes an interrupted
migration.
"""

import psycopg
from psycopg import sql

_SUPERUSER, _ROLE, _DATABASE = "postgres", "mizzen", "mizzen"
_RENAMING = "mizzen_renaming"
"""A temporary superuser that renames the old superuser, because no role can rename itself."""
_FOREIGN = """
    select case when c.relkind = 'S' then 'sequence' when c.relkind in ('v', 'm') then 'view' else 'table' end,
           c.oid::regclass::text
      from pg_class as c
     where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'S', 'v')
       and c.relowner <> %(role)s::regrole
       and not exists (select from pg_depend as d where d.objid = c.oid and d.deptype in ('a', 'i', 'e')
                       and d.classid = 'pg_class'::regclass and c.relkind = 'S')
    union all
    select 'routine', p.oid::regprocedure::text from pg_proc as p
     where p.pronamespace = 'public'::regnamespace and p.proowner <> %(role)s::regrole
       and not exists (select from pg_depend as d where d.objid = p.oid and d.deptype = 'e')
    union all
    select 'type', t.oid::regtype::text from pg_type as t left join pg_class as c on c.oid = t.typrelid
     where t.typnamespace = 'public'::regnamespace and t.typowner <> %(role)s::regrole
       and (t.typtype in ('e', 'd') or c.relkind = 'c')
"""
"""Selects kind and name of objects in the database that `mizzen` does not own. Indexes, triggers and owned sequences
change their owner with their table."""


def is_wrong_password(error: psycopg.OperationalError) -> bool:
    """Whether the server rejected the role's password, or the role does not exist."""
    return "password authentication failed" in str(error)


def settle(superuser_url: str, password: str) -> None:
    """Creates the role `mizzen` with `password` and its database, or migrates those of an earlier version. Idempotent.

    Raises:
        psycopg.OperationalError: the server does not respond, or rejects the superuser's password.
    """
    try:
        connection = psycopg.connect(superuser_url, autocommit=True, connect_timeout=5)
    except psycopg.OperationalError as error:
        if not is_wrong_password(error) or not _rename_superuser(superuser_url, password):
            raise
        connection = psycopg.connect(superuser_url, autocommit=True, connect_timeout=5)
    with connection:
        connection.execute(f"drop role if exists {_RENAMING}")
        if connection.execute("select 1 from pg_roles where rolname = %s", (_ROLE,)).fetchone() is None:
            connection.execute(f"create role {_ROLE}")
        may = "login nosuperuser nocreatedb nocreaterole noreplication nobypassrls"
        connection.execute(sql.SQL(f"alter role {_ROLE} {may} password {{}}").format(password))
        owner = connection.execute(
            "select datdba = %s::regrole from pg_database where datname = %s", (_ROLE, _DATABASE)
        ).fetchone()
        if owner is None:
            connection.execute(f"create database {_DATABASE} owner {_ROLE}")
        elif not owner[0]:
            connection.execute(f"alter database {_DATABASE} owner to {_ROLE}")
    with psycopg.connect(superuser_url, dbname=_DATABASE, connect_timeout=5) as connection:
        for kind, name in connection.execute(_FOREIGN, {"role": _ROLE}).fetchall():
            connection.execute(f"alter {kind} {name} owner to {_ROLE}")


def _rename_superuser(superuser_url: str, password: str) -> bool:
    """Renames the superuser `mizzen` of an earlier version and sets its password. Returns False if there is none."""
    wanted = psycopg.conninfo.conninfo_to_dict(superuser_url)["password"]
    try:
        with psycopg.connect(superuser_url, user=_ROLE, password=password, autocommit=True) as old:
            if old.execute("select rolsuper from pg_roles where rolname = current_user").fetchone() != (True,):
                return False
            old.execute(f"drop role if exists {_RENAMING}")
            old.execute(sql.SQL(f"create role {_RENAMING} superuser login password {{}}").format(wanted))
        with psycopg.connect(superuser_url, user=_RENAMING) as renaming:
            renaming.execute(f"alter role {_ROLE} rename to {_SUPERUSER}")
            renaming.execute(sql.SQL(f"alter role {_SUPERUSER} password {{}}").format(wanted))
    except psycopg.OperationalError as error:
        if is_wrong_password(error):
            return False
        raise
    return True
