"""`infra/db/functions` is the only source of the database's functions, types and triggers."""

import re
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, text

import infra.db
from infra.db import migrate
from infra.db.migrate import upgrade
from infra.db.session import open_engine
from tests.databases import Databases

FOLDER = Path(infra.db.__file__).parent / "functions"
FUNCTIONS = "select proname, pg_get_functiondef(oid) from pg_proc where pronamespace = 'public'::regnamespace"
TRIGGERS = "select tgname, pg_get_triggerdef(oid) from pg_trigger where not tgisinternal"
FIELDS = (
    "select c.relname, string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod), ', ' order by a.attnum)"
    " from pg_class as c join pg_attribute as a on a.attrelid = c.oid"
    " where c.relkind = 'c' and c.relnamespace = 'public'::regnamespace and a.attnum > 0 group by c.relname"
)


def _definitions(connection: Connection) -> dict[str, dict[str, str]]:
    kinds = {"function": FUNCTIONS, "trigger": TRIGGERS, "type": FIELDS}
    return {kind: {row[0]: row[1] for row in connection.execute(text(query))} for kind, query in kinds.items()}


@pytest.mark.parametrize("kind", ["function", "trigger", "type"])
def test_each_definition_stands_once_in_the_files(database: Engine, kind: str) -> None:
    """The files create exactly the functions, triggers and composite types of the database, each in one place."""
    sql = "".join(path.read_text() for path in FOLDER.glob("*.sql"))
    with database.connect() as connection:
        found = _definitions(connection)[kind]
    assert sorted(re.findall(rf"^create (?:constraint )?{kind} (\w+)", sql, re.MULTILINE)) == sorted(found) != []


def test_a_migration_creates_functions_and_triggers_from_the_files(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a migration the database has the definitions of the files again, whatever it had before.

    The one revision has no successor yet, so the test calls the database's revision the one before it.
    """
    with databases.taken() as url:
        engine = open_engine(url)
        with engine.begin() as connection:
            expected = _definitions(connection)
            connection.exec_driver_sql(
                "create or replace function award_allocate(machine award_machine, requested award_request,"
                " victims award_victim[]) returns award_allocation language sql as 'select null::award_allocation'"
            )
            for statement in (
                "drop function log_inserts cascade",
                "drop trigger replica_became_ready on replica",
                "alter type award_victim add attribute another text",
            ):
                connection.exec_driver_sql(statement)
            assert _definitions(connection) != expected
        monkeypatch.setattr(migrate, "head", lambda: "0101")
        upgrade(engine)
        with engine.connect() as connection:
            assert _definitions(connection) == expected
        engine.dispose()


def test_files_have_short_lines() -> None:
    """No line of the SQL files is longer than 120 characters."""
    lines = [line for path in FOLDER.glob("*.sql") for line in path.read_text().splitlines() if len(line) > 120]
    assert lines == []
