"""Leader election for periodic loops: one process of an installation runs the rounds, and the others are on standby."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum, unique

from sqlalchemy import Connection, Engine, text

from activities.rounds import RoundLog
from infra.db.session import in_thread

_log = logging.getLogger(__name__)
_LATE_S, _LATE_ROUNDS = 600.0, 10
"""A loop is late if no round has succeeded for so many seconds and so many intervals."""


@unique
class Leader(IntEnum):
    """The Postgres advisory locks of the loops."""

    RECONCILING = 0x6D697A7A656E01
    PROGRESS = 0x6D697A7A656E02
    POOLS = 0x6D697A7A656E03
    READINESS = 0x6D697A7A656E04
    PACING = 0x6D697A7A656E05
    CREDITS = 0x6D697A7A656E06
    NOTIFYING = 0x6D697A7A656E07
    ALERTING = 0x6D697A7A656E08
    REPORTING = 0x6D697A7A656E09
    PLANNING_POOLS = 0x6D697A7A656E0A


def claim(engine: Engine, lock: int, leader: Connection | None) -> Connection | None:
    """Returns a connection that holds the advisory lock; None: another process holds it.

    `leader` is the connection of the previous call. It is returned if it still works.
    """
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
    one_round: Callable[[], Awaitable[Sequence[str] | None]],
    interval_s: float,
    share: float = 1.0,
) -> None:
    """Runs rounds until cancelled, while this process holds the advisory lock `lock`.

    `one_round` raises an error, or returns the messages of the parts that failed. A failed round is logged and
    published under the name `what`, and the next round follows after `interval_s`. `share` is the
    fraction of time that rounds may take: after two long rounds in a row, the pause is longer than `interval_s`. A
    single long round and failed rounds do not lengthen the pause, because they waited for a service that was down, and
    the round after them has the most to repair.
    """
    leader: Connection | None = None
    last_s = 0.0
    rounds = RoundLog(engine, what, max(_LATE_S, _LATE_ROUNDS * interval_s))
    try:
        while True:
            began_s, failed = time.monotonic(), False
            try:
                leader = await in_thread(claim, engine, lock, leader)
                if leader is not None:
                    async with rounds.one_async() as failures:
                        failures += await one_round() or ()
            except Exception as error:  # Postgres or Temporal does not answer. The next round tries again.
                failed = True
                _log.warning("%s: %s; trying again", what, error)
            took_s = 0.0 if failed else time.monotonic() - began_s
            await asyncio.sleep(max(interval_s, min(took_s, last_s) / share))
            last_s = took_s
    finally:
        if leader is not None:
            leader.invalidate()  # A connection that returns to the pool would keep the lock.
            leader.close()
