"""Heartbeats of the agent's activities, and the conversion of cancellations into retryable failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from domain.protocol.machines import DETACHED, NodeHeartbeat

_LATE_S = 7.5
_UNTIMED_S = 30.0


def pause_s(interval_s: float) -> float:
    """Returns the interval between heartbeats of this activity: at most `interval_s`, and a quarter of its timeout."""
    timeout = activity.info().heartbeat_timeout
    return interval_s if timeout is None else min(interval_s, timeout.total_seconds() / 4)


def attend_pause_s(most_s: float | None) -> float:
    """Returns the interval between two heartbeats of `machine.attend`, at most `most_s`.

    The margin to the heartbeat timeout is `_LATE_S`, or three quarters of a short timeout. If a heartbeat is later
    than that, the activity is retried; the machine is not declared lost.
    """
    timeout = activity.info().heartbeat_timeout
    timeout_s = _UNTIMED_S if timeout is None else timeout.total_seconds()
    seldom_s = max(timeout_s / 4, timeout_s - _LATE_S)
    return min(seldom_s, most_s or seldom_s)


@contextlib.asynccontextmanager
async def heartbeats(
    interval_s: float, details: Callable[[], NodeHeartbeat | None] = lambda: None
) -> AsyncIterator[None]:
    """Sends heartbeats with `details` while the body runs. The first one is sent one interval after the start."""
    every_s = pause_s(interval_s)

    async def beat() -> None:
        while True:
            await asyncio.sleep(every_s)
            activity.heartbeat(*filter(None, [details()]))

    sending = asyncio.create_task(beat())
    try:
        yield
    finally:
        sending.cancel()


@contextlib.contextmanager
def detaching() -> Iterator[None]:
    """Converts a cancellation into the retryable failure `DETACHED`, unless a workflow requested the cancellation.

    Other causes are a stopping agent and a missed heartbeat. The tasks continue, and a retry of the activity
    re-attaches to them. Without this conversion the SDK reports the cancellation by a stopping worker as the end of the
    activity, without a retry.
    """
    try:
        yield
    except asyncio.CancelledError:
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            raise
        raise ApplicationError(
            "the agent detached from the tasks, which continue",
            type=DETACHED,
            next_retry_delay=timedelta(seconds=1),
            category=ApplicationErrorCategory.BENIGN,
        ) from None
