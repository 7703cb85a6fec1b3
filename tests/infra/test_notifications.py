"""Waiting for notifications of Postgres."""

import asyncio
import contextlib
import gc
import time

import psycopg
import pytest

from infra.db import notifications
from infra.db.notifications import notified


async def test_a_notification_ends_the_wait(database_url: str) -> None:
    """A notification ends the wait immediately, one return for all that have arrived; else the time limit ends it."""
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as listener,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other,
    ):
        await listener.execute("listen here")
        waiting = asyncio.create_task(notified(listener))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await other.execute("notify here")
        assert await asyncio.wait_for(waiting, 10)
        await other.execute("begin; notify here, '0'; notify here, '1'; notify here, '2'; commit")
        assert await notified(listener, 10)
        assert not await notified(listener, 0.3)


async def test_an_ended_connection_is_an_error(database_url: str) -> None:
    """A connection that the server ended raises an error instead of waiting for ever."""
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as listener,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other,
    ):
        await listener.execute("listen here")
        waiting = asyncio.create_task(notified(listener))
        await asyncio.sleep(0.1)
        await other.execute("select pg_terminate_backend(%s)", (listener.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            for _ in range(10):
                await asyncio.wait_for(waiting, 10)
                waiting = asyncio.create_task(notified(listener))


async def test_a_cancellation_is_never_lost(database_url: str) -> None:
    """A cancellation that coincides with a notification still cancels; otherwise a listening loop would never end."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as listener:
        await listener.execute("listen here")

        async def listens() -> None:
            while True:
                await notified(listener, 60.0)

        with psycopg.connect(database_url, autocommit=True) as other:
            for turns in range(8):
                task = asyncio.create_task(listens())
                await asyncio.sleep(0.01)
                other.execute("notify here")
                time.sleep(0.01)  # The event loop reads it in its next iteration.
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=5)
                assert done, f"no end after a cancellation {turns} loop iterations after the notification"


async def test_a_cancelled_connect_leaves_no_connection(database_url: str) -> None:
    """Whenever it is cancelled; an open connection would be reported when it is collected."""
    for turns in range(12):
        connecting = asyncio.create_task(notifications.connect(database_url, application_name="left-open"))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await connecting).close()
    gc.collect()
    async with await notifications.connect(database_url) as connection:
        found = "select count(*) from pg_stat_activity where application_name = 'left-open'"
        for _ in range(100):
            row = await (await connection.execute(found)).fetchone()
            if row == (0,):
                break
            await asyncio.sleep(0.05)
        assert row == (0,)
