"""Locks that order the start of an attempt's tasks on this machine and requests to stop them."""

import asyncio
import weakref


class StartLocks:
    """One lock for each workload. It is held while tasks of the workload are started, or are told to stop."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def of(self, workload_id: str) -> asyncio.Lock:
        """Returns the lock of a workload."""
        return self._locks.setdefault(workload_id, asyncio.Lock())
