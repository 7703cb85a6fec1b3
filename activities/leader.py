"""Loops of which one process of an installation does the rounds, and the others wait to take its place."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import IntEnum, unique

from sqlalchemy import Connection, Engine, text

from infra.db.session import in_thread

_log = logging.getLogger(__name__)


@unique
class Leader(IntEnum):
    """The advisory locks of Postgres by which one process has a loop, each another number."""

    RECONCILING = 0x6D697A7A656E01
    PROGRESS = 0x6D697A7A656E02
    POOLS = 0x6D697A7A656E03


def claim(engine: Engine, lock: int, leader: Connection | None) -> Connection | None:
    """A connection that holds the advisory lock, `leader` if it still does; None: another process has it."""
    try:
        if leader is not None:
            leader.execute(text("select 1"))
            return leader
    except Exception:
        leader.invalidate() if leader is not None else None
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    if connection.scalar(text("select pg_try_advisory_lock(:key)"), {"key": lock}):
        return connection
    connection.close()
    return None


async def lead(
    engine: Engine,
    lock: int,
    what: str,
    one_round: Callable[[], Awaitable[None]],
    interval_s: float,
    share: float = 1.0,
) -> None:
    """Runs rounds until cancelled, while this process holds the advisory lock `lock`.

    A round that fails is logged, as `what`, and the next one begins after `interval_s`. `share` is the part of the time
    that rounds may take: after long ones the pause is longer. A single long round does not lengthen it, nor do failed
    ones: they waited for a service that was away, and the round after them has the most to repair.
    """
    leader: Connection | None = None
    last_s = 0.0
    try:
        while True:
            began_s, failed = time.monotonic(), False
            try:
                leader = await in_thread(claim, engine, lock, leader)
                if leader is not None:
                    await one_round()
            except Exception as error:  # Postgres or Temporal is away: the next round finds the same
                failed = True
                _log.warning("%s: %s; trying again", what, error)
            took_s = 0.0 if failed else time.monotonic() - began_s
            await asyncio.sleep(max(interval_s, min(took_s, last_s) / share))
            last_s = took_s
    finally:
        if leader is not None:
            leader.invalidate()  # Back in its pool it would keep the lock.
            leader.close()
