"""The databases that tests use one after the other: each test gets a migrated database without rows."""

from collections.abc import Iterator

import psycopg
import pytest

from tests.databases import Databases


@pytest.fixture
def few(postgres_url: str, template_database: str) -> Iterator[Databases]:
    """Databases of which no other test has used one."""
    made = Databases(postgres_url, template_database)
    yield made
    made.close()


def test_the_next_test_gets_the_database_without_rows_and_connections(few: Databases) -> None:
    """Rows, sequences and connections of the test before are gone."""
    url = few.take()
    with psycopg.connect(url, autocommit=True) as before:
        before.execute("insert into region (name, bucket_url) values ('north', 'file:///b')")
        before.execute("insert into event (kind, detail) values ('x', '{}')")
        few.give(url)
        with pytest.raises(psycopg.OperationalError):
            before.execute("select 1")
    assert few.take() == url
    with psycopg.connect(url) as after:
        assert after.execute("select count(*) from region").fetchone() == (0,)
        assert after.execute("insert into event (kind, detail) values ('x', '{}') returning id").fetchone() == (1,)
    few.drop(url)


@pytest.mark.parametrize(
    "change",
    [
        "create table more (n int)",
        "alter table region add column more int",
        "alter table region disable trigger user",
        "drop table event cascade",
        "create function more() returns int language sql as 'select 1'",
    ],
)
def test_a_database_with_other_tables_or_functions_is_dropped(few: Databases, change: str) -> None:
    """The next test gets a new database."""
    url = few.take()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(change)  # type: ignore[call-overload]
    few.give(url)
    other = few.take()
    assert other != url
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    few.drop(other)
