"""A thread pool that also works while the interpreter is shutting down.

A background save can outlive the main thread. Python then starts no new threads, and its pools accept no new work, so
this pool runs the remaining work sequentially in the calling thread.

`concurrent.futures` is imported by the first pool, because it takes a tenth of the SDK's import.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

AT_ONCE = 16
"""Concurrent requests of one copy, and connections that a store keeps for them."""

P = ParamSpec("P")
R = TypeVar("R")


def ending() -> bool:
    """Return whether the main thread has ended, so that no new threads can be started."""
    return not threading.main_thread().is_alive()


def _pool(count: int) -> "ThreadPoolExecutor":
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(count, thread_name_prefix="mizzen")


class Workers:
    """A thread pool, used as a context manager. On exit it waits for running work and cancels queued work."""

    def __init__(self, count: int) -> None:
        """Create a pool of up to `count` threads."""
        self._pool = None if ending() else _pool(count)

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Run `work` in a thread of the pool; if no thread can be started, run it now in the calling thread."""
        if self._pool is not None and not ending():
            try:
                return self._pool.submit(work, *args, **kwargs)
            except RuntimeError:
                pass
        from concurrent.futures import Future

        done: Future[R] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
