"""Deletes objects in all stores at the same time, so that a store that does not answer delays no other.

Each store has a thread of its own, and its work ends after a time limit. Clients of stores wait for minutes before they
give up, and a file system can block for ever: such a thread is left alone, and its store is skipped until it ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from infra.copies import CopyStore, open_copy_store

_log = logging.getLogger(__name__)

Work = Callable[[CopyStore], None]
"""Deletes some objects in a store."""


class Stores:
    """Does work in stores. One round of work runs at a time."""

    def __init__(self) -> None:
        self._busy: dict[str, threading.Thread] = {}

    def run(
        self, work: Mapping[str, Sequence[tuple[str, Work]]], limit_s: float
    ) -> tuple[set[tuple[str, str]], list[str]]:
        """Does the named work of each store, by URL, in order, until all is done or `limit_s` seconds have passed.

        Returns what was done, as URL and name, and a message for each store with work that failed. The other work is
        still done.
        """
        over = threading.Event()
        done: set[tuple[str, str]] = set()
        failures: list[str] = []
        self._busy = {url: thread for url, thread in self._busy.items() if thread.is_alive()}
        threads = {
            url: threading.Thread(target=_do, args=(url, tasks, over, done, failures), name="deletions", daemon=True)
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
            failures.append(f"{url}: its work did not end in time")
        for failure in failures:
            _log.warning("deletions: %s; trying again", failure)
        return done.copy(), failures.copy()


def _do(
    url: str,
    tasks: Sequence[tuple[str, Work]],
    over: threading.Event,
    done: set[tuple[str, str]],
    failures: list[str],
) -> None:
    failed: list[str] = []
    try:
        store = open_copy_store(url)
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
        failures.append(f"{url}: {len(failed)} of {len(tasks)} deletions failed; the first: {failed[0]}")
