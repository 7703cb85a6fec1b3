"""Threads that work at the same time, also for a thread that goes on while the interpreter is ending.

A save in the background is finished after the script's last line. Python starts no new threads then, and its pools take
no new work: what is left is done one after the other.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

AT_ONCE = 16
"""Requests that one copy has under way, and connections that a store keeps for them."""

P = ParamSpec("P")
R = TypeVar("R")


def ending() -> bool:
    """Whether the script has come to its end, and no new threads can be started."""
    return not threading.main_thread().is_alive()


class Workers:
    """A pool of threads, to be used with `with`: at its end nothing of it runs any more."""

    def __init__(self, count: int) -> None:
        """Up to `count` at the same time."""
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="mizzen")

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Do `work` in one of the threads, or here and now where there can be none."""
        if not ending():
            try:
                return self._pool.submit(work, *args, **kwargs)
            except RuntimeError:
                pass
        done: Future[R] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
