"""Engines and transactions. Sessions are short: never open across a network call."""

import asyncio
import math
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from infra.errors import ConfigurationError

_IDLE_S = 5.0
P = ParamSpec("P")
T = TypeVar("T")


def sqlalchemy_url(database_url: str) -> str:
    """`postgresql://...` as SQLAlchemy wants it, with the psycopg 3 driver.

    Raises:
        ConfigurationError: it is not a Postgres URL.
    """
    try:
        url = make_url(database_url)
    except Exception as error:
        raise ConfigurationError(f"database: {database_url!r} is not a URL: {error}") from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError(f"database: {url.get_backend_name()!r} is not supported, give a postgresql:// URL")
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def open_engine(database_url: str, *, pool_size: int = 8, application: str = "mizzen") -> Engine:
    """An engine that tests connections before use, so that a restart of Postgres costs one retry, not an error.

    A statement is the test of a connection that has not been used for `_IDLE_S`. Others are only looked at: a server
    that ends, or ends a connection, closes it.

    Raises:
        ConfigurationError: `database_url` is not a Postgres URL.
    """
    engine = create_engine(
        sqlalchemy_url(database_url),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_use_lifo=True,  # A few connections in turn, on which statements are prepared.
        connect_args={"application_name": application, "connect_timeout": 5},
    )
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", partial(_test, engine))
    return engine


def _note_use(_: Any, record: ConnectionPoolEntry) -> None:
    record.info["used_s"] = time.monotonic()


def _test(engine: Engine, connection: Any, record: ConnectionPoolEntry, _: Any) -> None:
    """As `pool_pre_ping`, but without a statement for connections that were used lately.

    Raises:
        InvalidatePoolError: the connection is gone; the pool opens others.
    """
    if time.monotonic() - record.info.get("used_s", -math.inf) < _IDLE_S and not _has_said_something(connection):
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


def _has_said_something(connection: Any) -> bool:
    """Whether something unasked for can be read from a connection's server: an end, or a notice of one."""
    poller = select.poll()
    poller.register(connection.pgconn.socket, select.POLLIN)
    return bool(poller.poll(0))


@contextmanager
def transaction(engine: Engine, *, isolation: str | None = None) -> Iterator[Session]:
    """A session in one transaction: committed at the end of the block, rolled back on an exception.

    `isolation` is Postgres's name of a level (`REPEATABLE READ` for a snapshot); None is READ COMMITTED. `AUTOCOMMIT`
    is for one statement: it saves the round trips that begin and commit.
    """
    with engine.connect() as connection:
        if isolation is not None:
            connection = connection.execution_options(isolation_level=isolation)
        with connection.begin(), Session(connection, expire_on_commit=False) as session:
            yield session
            session.flush()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a blocking function answers. A cancellation waits for it, so that it leaves no connection behind."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
