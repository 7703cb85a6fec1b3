"""`infra/db/functions` has the current version of every SQL function of the migrations, one file per function."""

from pathlib import Path

from sqlalchemy import Engine, text

import infra.db

FOLDER = Path(infra.db.__file__).parent / "functions"
DEFINITIONS = text(
    "select proname, pg_get_functiondef(p.oid) from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace"
    " where n.nspname = 'public'"
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
