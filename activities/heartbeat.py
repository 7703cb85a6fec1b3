"""Heartbeats of a long activity. They continue while a single operation takes long, such as a large object or query."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from temporalio import activity

HEARTBEAT_S = 5.0


@contextmanager
def heartbeating() -> Iterator[Callable[..., None]]:
    """Sends heartbeats every `HEARTBEAT_S` seconds until the end of the block, with the newest details.

    Yields a function that sets the details and sends a heartbeat immediately.
    """
    told: tuple[object, ...] = ()
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(HEARTBEAT_S):
            activity.heartbeat(*told)

    def tell(*details: object) -> None:
        nonlocal told
        told = details
        activity.heartbeat(*told)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(repeat,), daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        done.set()
        thread.join()
