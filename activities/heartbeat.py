"""Signs of life of a long effect, also while one thing of it takes long: an object of gigabytes, a large query."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from temporalio import activity

HEARTBEAT_S = 5.0


@contextmanager
def heartbeating() -> Iterator[Callable[..., None]]:
    """Heartbeats with the details last told, and at once when they are told."""
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
