"""Waiting for notifications of Postgres without polling."""

import asyncio
from contextlib import suppress
from typing import Any

import psycopg


async def notified(connection: psycopg.AsyncConnection[Any], timeout_s: float | None = None) -> bool:
    """Waits for a notification on a connection that listens; False: there was none in `timeout_s` seconds.

    Several that have arrived count as one. psycopg's own wait polls ten times a second. The connection must run no
    other statement, because a notification that arrives with its result is lost; after `listen`, read the state once.

    Raises:
        psycopg.OperationalError: the connection has ended.
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
