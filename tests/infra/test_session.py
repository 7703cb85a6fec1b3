"""Postgres connections: closed connections are replaced, and recently used ones are not tested."""

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import Engine, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from infra.db import session
from infra.db.session import close_engine, open_engine, transaction


def _backend(engine: Engine) -> int:
    with transaction(engine) as opened:
        return int(opened.execute(text("select pg_backend_pid()")).scalar_one())


def _status(opened: Session) -> TransactionStatus:
    connection = opened.connection().connection.dbapi_connection
    assert connection is not None
    return TransactionStatus(connection.info.transaction_status)  # type: ignore[attr-defined]


def test_a_connection_that_was_ended_is_replaced(database_url: str, database: Engine) -> None:
    """A connection that the server closed is replaced without an error, even if it was used just before."""
    before = _backend(database)
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s, 5000)", (before,))
        assert _backend(database) != before


@pytest.mark.parametrize("idle_s, tests", [(5.0, 0), (0.0, 3)])
def test_one_that_was_used_lately_is_not_asked(
    database: Engine, monkeypatch: pytest.MonkeyPatch, idle_s: float, tests: int
) -> None:
    """A connection is tested before use only if it was idle for some time."""
    monkeypatch.setattr(session, "_IDLE_S", idle_s)
    _backend(database)
    asked: list[object] = []
    monkeypatch.setattr(database.dialect, "do_ping", lambda connection: asked.append(connection) or True)
    for _ in range(3):
        _backend(database)
    assert len(asked) == tests


def test_one_statement_needs_no_transaction(database: Engine) -> None:
    """With `AUTOCOMMIT` a statement runs without a transaction; the next session has one again."""
    with transaction(database, isolation="AUTOCOMMIT") as opened:
        opened.execute(text("create table kept (n int)"))
        assert _status(opened) == TransactionStatus.IDLE
    with transaction(database) as opened:
        assert opened.execute(text("select count(*) from kept")).scalar_one() == 0
        assert _status(opened) == TransactionStatus.INTRANS


def test_a_closed_engine_leaves_no_connection(database_url: str) -> None:
    """A connection in use is closed when it is returned, and a thread that comes later gets none."""
    engine = open_engine(database_url)
    with engine.connect() as idle, engine.connect() as used:
        connections = [one.connection.dbapi_connection for one in (idle, used)]
        idle.close()
        close_engine(engine)
        assert used.execute(text("select 1")).scalar_one() == 1
    assert all(one is not None and one.closed for one in connections)  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="closed"):
        engine.connect()


def test_statements_are_not_compiled_just_in_time(database: Engine) -> None:
    """Compilation takes seconds where Postgres overestimates the cost of a statement of milliseconds."""
    with database.connect() as connection:
        assert connection.exec_driver_sql("show jit").scalar_one() == "off"
        connection.rollback()
        assert connection.exec_driver_sql("show jit").scalar_one() == "off"
