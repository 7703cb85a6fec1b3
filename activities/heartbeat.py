"""Signs of life of a long effect, also while one thing of it takes long: an object of gigabytes, a large query."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from temporalio import activity

BEAT_S = 5.0


@contextmanager
def beating() -> Iterator[Callable[..., None]]:
    """Heartbeats with the details last told, and at once when they are told."""
    told: tuple[object, ...] = ()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            activity.heartbeat(*told)

    def tell(*details: object) -> None:
        nonlocal told
        told = details
        activity.heartbeat(*told)

    beater = threading.Thread(target=contextvars.copy_context().run, args=(beat,), daemon=True)
    beater.start()
    try:
        yield tell
    finally:
        done.set()
        beater.join()
