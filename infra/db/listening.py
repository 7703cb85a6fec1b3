"""Waiting for notifications of Postgres without asking for them."""

import asyncio
from contextlib import suppress
from typing import Any

import psycopg


async def told(connection: psycopg.AsyncConnection[Any], timeout_s: float | None = None) -> bool:
    """Waits until a connection is told something; False: not in `timeout_s` seconds. All that has come counts as one.

    psycopg's own waiting wakes up ten times a second. The connection has nothing else to do: what is told while a
    statement runs on it is lost, so look for yourself after `listen`.

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
