"""`infra/db/functions` has the current text of every SQL function, and `infra/db/types.sql` of every composite type."""

from pathlib import Path

from alembic import command
from sqlalchemy import Connection, Engine, text

import infra.db
from infra.db import migrate

FOLDER = Path(infra.db.__file__).parent / "functions"
TYPES = Path(infra.db.__file__).parent / "types.sql"
DEFINITIONS = text(
    "select proname, pg_get_functiondef(p.oid) from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace"
    " where n.nspname = 'public'"
)
FIELDS = text(
    "select c.relname, a.attname, t.typname from pg_class as c join pg_attribute as a on a.attrelid = c.oid"
    " join pg_type as t on t.oid = a.atttypid join pg_namespace as n on n.oid = c.relnamespace"
    " where c.relkind = 'c' and n.nspname = :schema and a.attnum > 0 and not a.attisdropped"
    " order by c.relname, a.attnum"
)


def test_the_files_are_what_the_database_has(database: Engine) -> None:
    """Executing the files changes no function, and every function has a file."""
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.sql")}
    with database.connect() as connection:
        migrated = dict(connection.execute(DEFINITIONS).all())
        assert files.keys() == migrated.keys()
        for name, sql in files.items():
            assert f"create or replace function {name}(" in sql
            connection.exec_driver_sql(sql.replace("%", "%%"))
        now = dict(connection.execute(DEFINITIONS).all())
        connection.rollback()
    different = [name for name in migrated if now[name] != migrated[name]]
    assert different == []


def test_the_file_of_types_is_what_the_database_has(database: Engine) -> None:
    """The file's types, created in another schema, have the same names and fields as those of the migrations."""
    with database.connect() as connection:
        connection.exec_driver_sql("create schema other")
        connection.exec_driver_sql("set local search_path to other")
        connection.exec_driver_sql(TYPES.read_text())
        assert _fields(connection, "other") == _fields(connection, "public") != []
        connection.rollback()


def test_the_award_before_its_phases_comes_back(database: Engine) -> None:
    """Going back to revision 0020 restores the function of revision 0016, and leaves no type or helper behind."""
    with database.connect() as connection:
        config = migrate.config(connection)
        command.downgrade(config, "0020")
        restored = dict(connection.execute(DEFINITIONS).all())
        assert _fields(connection, "public") == []
        command.downgrade(config, "0015")
        command.upgrade(config, "0016")
        earlier = dict(connection.execute(DEFINITIONS).all())
        assert restored["award_plans"] == earlier["award_plans"]
        assert [name for name in restored if name.startswith("award_")] == ["award_plans"]
        connection.rollback()


def _fields(connection: Connection, schema: str) -> list[tuple[str, str, str]]:
    """Type, field and the field's type of every composite type in a schema, in order."""
    return [(row[0], row[1], row[2]) for row in connection.execute(FIELDS, {"schema": schema})]
