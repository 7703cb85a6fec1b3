"""Database engines and transactions. Keep sessions short: do not hold one open during a network request."""

import asyncio
import contextvars
import math
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import InvalidatePoolError, InvalidRequestError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from infra.errors import ConfigurationError

OLDEST_POSTGRES = 15
"""The oldest major version of Postgres that mizzen is tested with."""
_IDLE_S = 5.0
P = ParamSpec("P")
T = TypeVar("T")


def sqlalchemy_url(database_url: str) -> str:
    """Converts a `postgresql://` URL to SQLAlchemy's form with the psycopg 3 driver.

    Raises:
        ConfigurationError: `database_url` is not a Postgres URL.
    """
    try:
        url = make_url(database_url)
    except Exception as error:
        raise ConfigurationError(f"database: {database_url!r} is not a URL: {error}") from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError(f"database: {url.get_backend_name()!r} is not supported; must be a postgresql:// URL")
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def open_engine(database_url: str, *, pool_size: int = 8, application: str = "mizzen") -> Engine:
    """Creates an engine that tests pooled connections before use, so that a restart of Postgres causes no errors.

    A connection that was idle for `_IDLE_S` is tested with a statement. For other connections it only checks whether
    the server has sent anything, because a server that shuts down closes its connections.

    Each new connection of the engine raises ConfigurationError if the server does not suit (`refuse_server`).

    Raises:
        ConfigurationError: `database_url` is not a Postgres URL.
    """
    engine = create_engine(
        sqlalchemy_url(database_url),
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_use_lifo=True,  # Prefer the last used connections, on which statements are already prepared.
        connect_args={"application_name": application, "connect_timeout": 5},
    )
    event.listen(engine, "connect", _prepare, insert=True)  # Before SQLAlchemy's first statement.
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", partial(_test, engine))
    return engine


def close_engine(engine: Engine) -> None:
    """Closes an engine for good. A thread that still uses it may finish; its connection is then closed.

    `Engine.dispose` alone would lose that connection unclosed, and would let the thread open a new one. A thread of
    anyio can outlive the event loop that started it. Later connections are refused with InvalidRequestError.
    """
    event.listen(engine, "do_connect", _refuse)
    event.listen(engine, "checkin", _close)
    engine.dispose()


def _refuse(*_: Any) -> None:
    raise InvalidRequestError("the engine is closed")


def _close(connection: Any, _: ConnectionPoolEntry) -> None:
    if connection is not None:  # None: it was invalidated.
        connection.close()


def _prepare(connection: Any, _: ConnectionPoolEntry) -> None:
    """Checks the server, and switches off just-in-time compilation.

    Postgres chooses it by the estimated cost of a statement. In tables of some 100,000 rows it takes seconds for
    statements that run in milliseconds. This is a statement because connection poolers refuse `options`.
    """
    refuse_server(connection.info.server_version, connection.info.parameter_status("server_encoding"))
    connection.autocommit = True
    connection.execute("set jit = off")
    connection.autocommit = False


def refuse_server(version: int, encoding: str | None) -> None:
    """Checks a server's `server_version_num` and a database's encoding.

    Raises:
        ConfigurationError: mizzen does not run with them.
    """
    major = version // 10_000
    if major < OLDEST_POSTGRES:
        raise ConfigurationError(f"database: its server is Postgres {major}; must be {OLDEST_POSTGRES} or newer")
    if encoding != "UTF8":
        raise ConfigurationError(
            f"database: its encoding is {encoding}; must be UTF8: \"create database NAME encoding 'UTF8' template"
            ' template0"'
        )


def _note_use(_: Any, record: ConnectionPoolEntry) -> None:
    record.info["used_s"] = time.monotonic()


def _test(engine: Engine, connection: Any, record: ConnectionPoolEntry, _: Any) -> None:
    """Tests a connection like `pool_pre_ping`, but without a statement for connections that were used recently.

    Raises:
        InvalidatePoolError: the connection is closed. The pool then opens new connections.
    """
    if time.monotonic() - record.info.get("used_s", -math.inf) < _IDLE_S and not _has_said_something(connection):
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


def _has_said_something(connection: Any) -> bool:
    """Whether the server has closed the connection, or has announced that it will."""
    poller = select.poll()
    poller.register(connection.pgconn.socket, select.POLLIN)
    return bool(poller.poll(0))


@contextmanager
def transaction(engine: Engine, *, isolation: str | None = None) -> Iterator[Session]:
    """Opens a session in one transaction, which is committed at the end of the block and rolled back on an exception.

    `isolation` is the name of an isolation level (`REPEATABLE READ` for a snapshot); None means READ COMMITTED.
    `AUTOCOMMIT` saves the round trips for begin and commit if the block runs only one statement.
    """
    with engine.connect() as connection:
        if isolation is not None:
            connection = connection.execution_options(isolation_level=isolation)
        with connection.begin(), Session(connection, expire_on_commit=False) as session:
            yield session
            session.flush()


async def in_db(engine: Engine, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work(session, ...)` in a thread and in a transaction of its own, and returns its result (`in_thread`)."""

    def run() -> T:
        with transaction(engine) as session:
            return work(session, *args, **kwargs)

    return await in_thread(run)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a blocking function in a thread and returns its result.

    If cancelled, waits until the function has ended before it raises, so that no database connection stays in use.
    """
    return await in_thread_of(None, function, *args, **kwargs)


async def in_thread_of(threads: Executor | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same as `in_thread` with the given thread pool. None: the pool of the event loop."""
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    running = asyncio.get_running_loop().run_in_executor(threads, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
