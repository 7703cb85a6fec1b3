"""Engines and transactions. Sessions are short: never open across a network call."""

import asyncio
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


def open_engine(
    database_url: str, *, pool_size: int = 8, application: str = "mizzen", untested_s: float = 0.0
) -> Engine:
    """An engine that tests connections before use, so that a restart of Postgres costs one retry, not an error.

    A connection that was used within the last `untested_s` seconds is not tested, because a test costs as much as a
    short statement. Only callers that retry should set it.

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
    event.listen(engine, "checkout", partial(_test_idle, engine, untested_s))
    return engine


def _note_use(_: Any, record: ConnectionPoolEntry) -> None:
    record.info["used_s"] = time.monotonic()


def _test_idle(engine: Engine, untested_s: float, connection: Any, record: ConnectionPoolEntry, _: Any) -> None:
    """As `pool_pre_ping`, but not for connections that were used within `untested_s`.

    Raises:
        InvalidatePoolError: the connection is gone; the pool opens others.
    """
    if time.monotonic() - record.info.get("used_s", 0.0) < untested_s:
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


@contextmanager
def transaction(engine: Engine, *, isolation: str | None = None) -> Iterator[Session]:
    """A session in one transaction: committed at the end of the block, rolled back on an exception.

    `isolation` is Postgres's name of a level (`REPEATABLE READ` for a snapshot); None is READ COMMITTED.
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
