"""The roles of the embedded Postgres: the superuser `postgres`, and `mizzen`, which owns one database only.

Clusters of earlier versions had one role, the superuser `mizzen`. It is renamed, and a new `mizzen` takes over the
database and all that is in it. Every step may be repeated, so a kill in the middle is mended by the next start.
"""

import psycopg
from psycopg import sql

_SUPERUSER, _ROLE, _DATABASE = "postgres", "mizzen", "mizzen"
_RENAMING = "mizzen_renaming"
"""A superuser that exists for a moment only: no role can rename itself."""
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
    select 'type', t.oid::regtype::text from pg_type as t
     where t.typnamespace = 'public'::regnamespace and t.typowner <> %(role)s::regrole and t.typtype in ('e', 'd')
"""
"""Kind and name of what is not `mizzen`'s in its database; indexes, triggers and owned sequences follow their table."""


def is_wrong_password(error: psycopg.OperationalError) -> bool:
    """Whether the server refused a role's password, or does not know the role."""
    return "password authentication failed" in str(error)


def settle(superuser_url: str, password: str) -> None:
    """Makes the role `mizzen` with `password`, and its database, or brings those of an earlier version into this form.

    Raises:
        psycopg.OperationalError: the server does not answer, or refuses the superuser.
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
    """Gives the superuser `mizzen` of an earlier version its present name and password; whether there is such a one."""
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
