"""Waits for Postgres notifications (`NOTIFY`) without polling."""

import asyncio
from contextlib import suppress
from typing import Any

import psycopg


async def connect(url: str, **options: Any) -> psycopg.AsyncConnection[Any]:
    """Returns a new connection in autocommit mode. If the caller is cancelled meanwhile, none stays open.

    psycopg's own `connect` leaves its connection to the garbage collector then.

    Raises:
        psycopg.OperationalError: the server cannot be reached.
    """
    connecting = asyncio.ensure_future(psycopg.AsyncConnection.connect(url, autocommit=True, **options))
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        with suppress(psycopg.Error):
            (await connecting).pgconn.finish()
        raise


async def notified(connection: psycopg.AsyncConnection[Any], timeout_s: float | None = None) -> bool:
    """Waits for a notification on a listening connection. Returns False if none arrives within `timeout_s` seconds.

    Consumes all notifications that have arrived. psycopg's own wait polls ten times per second. No other statement may
    run on the connection, because a notification that arrives with the statement's result is lost. For the same reason,
    read the state once after `LISTEN`.

    Raises:
        psycopg.OperationalError: the connection is closed.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    descriptor = connection.fileno()
    loop.add_reader(descriptor, readable.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await readable.wait()
    finally:
        loop.remove_reader(descriptor)
    connection.pgconn.consume_input()
    found = False
    while connection.pgconn.notifies() is not None:
        found = True
    return found
