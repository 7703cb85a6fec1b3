"""Deletes objects in all stores at the same time, so that a store that does not answer delays no other.

Each store has a thread of its own, and its work ends after a time limit. Clients of stores wait for minutes before they
give up, and a file system can block for ever: such a thread is left alone, and its store is skipped until it ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mizzen.objects.store import ObjectStore, open_store

_log = logging.getLogger(__name__)

Work = Callable[[ObjectStore], None]
"""Deletes some objects in a store."""


class Stores:
    """Does work in stores. One round of work runs at a time."""

    def __init__(self) -> None:
        self._busy: dict[str, threading.Thread] = {}

    def run(self, work: Mapping[str, Sequence[tuple[str, Work]]], limit_s: float) -> set[tuple[str, str]]:
        """Does the named work of each store, by URL, in order, until all is done or `limit_s` seconds have passed.

        Returns what was done, as URL and name.

        Errors are logged with the name of the work that failed; the other work is still done.
        """
        over = threading.Event()
        done: set[tuple[str, str]] = set()
        self._busy = {url: thread for url, thread in self._busy.items() if thread.is_alive()}
        threads = {
            url: threading.Thread(target=_do, args=(url, tasks, over, done), name="deletions", daemon=True)
            for url, tasks in work.items()
            if url not in self._busy
        }
        for thread in threads.values():
            thread.start()
        ends_s = time.monotonic() + limit_s
        for thread in threads.values():
            thread.join(max(0.0, ends_s - time.monotonic()))
        over.set()
        self._busy |= {url: thread for url, thread in threads.items() if thread.is_alive()}
        for url in sorted(self._busy.keys() & work.keys()):
            _log.warning("the store %s did not end its work in time; it is tried again later", url)
        return done.copy()


def _do(url: str, tasks: Sequence[tuple[str, Work]], over: threading.Event, done: set[tuple[str, str]]) -> None:
    failed: list[str] = []
    try:
        store = open_store(url)
        for name, work in tasks:
            if over.is_set():
                break
            try:
                work(store)
                done.add((url, name))
            except Exception as error:  # Any error of the store's client.
                failed.append(f"{name}: {error}")
    except Exception as error:
        failed.append(str(error))
    if failed:
        _log.warning("%s: %d of %d deletions failed; the first: %s", url, len(failed), len(tasks), failed[0])
