"""Heartbeats of a long activity. They continue while a single operation takes long, such as a large object or query."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from temporalio import activity

_log = logging.getLogger(__name__)
HEARTBEAT_S = 5.0


@contextmanager
def heartbeating() -> Iterator[Callable[..., None]]:
    """Sends heartbeats every `HEARTBEAT_S` seconds until the end of the block, with the newest details.

    Yields a function that sets the details and sends a heartbeat immediately. It can be called from any thread, also in
    an async activity, where `activity.heartbeat` itself works only on the event loop.
    """
    told: tuple[object, ...] = ()
    done = threading.Event()
    send = _sender()

    def repeat() -> None:
        while not done.wait(HEARTBEAT_S):
            try:
                send(*told)
            except TimeoutError:  # The event loop was busy for ten seconds. The next heartbeat may be in time.
                _log.warning("a heartbeat was not sent: the worker's event loop does not respond")

    def beat(*details: object) -> None:
        nonlocal told
        told = details
        send(*told)

    thread = threading.Thread(target=repeat, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield beat
    finally:
        done.set()
        thread.join()


def _sender() -> Callable[..., None]:
    """Returns a function that sends a heartbeat of the current activity from any thread."""
    context = contextvars.copy_context()
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        # A context can be entered by one thread at a time, so each heartbeat gets a copy.
        return lambda *details: context.copy().run(activity.heartbeat, *details)
    return lambda *details: _on(loop, context, partial(activity.heartbeat, *details))


def _on(loop: asyncio.AbstractEventLoop, context: contextvars.Context, send: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(send, context=context)
