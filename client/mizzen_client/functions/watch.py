"""Waits for the ends of many calls with few requests.

One request lists the workloads of an executor, which have a label in common. The elements of an array are listed only
after its counts have changed. While the API does not respond, the watch keeps trying.
"""

import queue
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mizzen_client.errors import Conflict, NotFound, Unavailable, Unreachable
from mizzen_client.functions import outcomes
from mizzen_client.functions.future import CallFuture
from mizzen_client.views import TERMINAL_PHASES, Workload

if TYPE_CHECKING:
    from mizzen_client import Client

_FIRST_S = 0.1
_LONGEST_S = 3.0
_GROWTH = 1.3
_SPARING = 4.0
_FETCHERS = 4

Pending = dict[str, CallFuture[Any]]
"""Futures that have not ended, by the ids of their workloads."""


class Watch:
    """Gives futures their outcomes. Its threads live as long as there are futures that have not ended."""

    def __init__(self, client: "Client", label: str) -> None:
        """`label` is the value of the label of the executor."""
        self._client = client
        self._label = label
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._pending: dict[str, Pending] = {}
        """The futures of each workload, or of the elements of each array, by the id of the workload or array."""
        self._seen: dict[str, Any] = {}
        self._is_running = False

    def add(self, workload: str, futures: Pending) -> None:
        """Watch a workload or an array; `futures` maps ids of the workload or the elements to futures."""
        with self._lock:
            self._pending[workload] = futures
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="mizzen futures", daemon=True).start()
        self._wake.set()

    def pending(self) -> list[CallFuture[Any]]:
        """Return the futures that have not ended."""
        with self._lock:
            return [future for group in self._pending.values() for future in group.values() if not future.done()]

    def cancel(self, chosen: Collection[CallFuture[Any]]) -> None:
        """Cancel calls, with one request for an array whose unfinished calls are all among them.

        Raises:
            ClientError: the API cannot be reached.
        """
        with self._lock:
            groups = {workload: list(group.values()) for workload, group in self._pending.items()}
        for workload, group in groups.items():
            live = [future for future in group if not future.done()]
            own = [future for future in live if future in chosen]
            if len(own) < len(live) or len(own) < 2:
                for future in own:
                    future.cancel()
                continue
            with suppress(Conflict):  # It has ended.
                self._client.cancel(workload)
            for future in own:
                future.end_cancelled()

    def _run(self) -> None:
        ended: queue.SimpleQueue[tuple[CallFuture[Any], Workload] | None] = queue.SimpleQueue()
        for _ in range(_FETCHERS):
            threading.Thread(target=self._fetch, args=(ended,), name="mizzen results", daemon=True).start()
        pause_s = _FIRST_S
        while self._has_more():
            self._wake.clear()
            began_s = time.monotonic()
            try:
                is_changed = self._look(ended)
            except (Unreachable, Unavailable):
                is_changed = False
            except Exception as error:  # Such as `NotAllowed`: no future may wait for ever.
                self._fail(error)
                continue
            pause_s = _FIRST_S if is_changed else min(_LONGEST_S, pause_s * _GROWTH)
            # Long lists take the API long, and are then read less often.
            pause_s = max(pause_s, _SPARING * (time.monotonic() - began_s))
            if self._wake.wait(pause_s):
                pause_s = _FIRST_S
        for _ in range(_FETCHERS):
            ended.put(None)

    def _has_more(self) -> bool:
        with self._lock:
            for id_, group in list(self._pending.items()):
                if all(future.done() for future in group.values()):
                    del self._pending[id_]
                    self._seen.pop(id_, None)
            self._is_running = bool(self._pending)
            return self._is_running

    def _look(self, ended: "queue.SimpleQueue[Any]") -> bool:
        """List the workloads, and hand over those that have ended. Return whether something has changed."""
        with self._lock:
            missing = set(self._pending)
        oldest, is_changed = min(missing, default=""), False
        for workload in self._client.workloads(labels={outcomes.LABEL: self._label}):
            if workload["id"] < oldest:
                break  # Newest first: all of these have ended.
            if workload["id"] in missing:
                missing.discard(workload["id"])
                is_changed |= self._notice(workload, ended)
        for id_ in missing:
            try:
                is_changed |= self._notice(self._client.workload(id_), ended)
            except NotFound as error:
                self._fail(error, id_)
        return is_changed

    def _notice(self, workload: Workload, ended: "queue.SimpleQueue[Any]") -> bool:
        counts, group = workload["array"], self._pending[workload["id"]]
        seen = (workload["phase"], counts)
        if self._seen.get(workload["id"]) == seen:
            return False
        is_over = workload["phase"] in TERMINAL_PHASES
        for row in [workload] if counts is None else self._client.workloads(array=workload["id"]):
            future = group.get(row["id"])
            if future is None or future.done() or future.phase in TERMINAL_PHASES:
                continue
            future.phase = row["phase"]
            if row["phase"] in TERMINAL_PHASES:
                ended.put((future, row))
        for future in list(group.values()) if is_over and counts is not None else ():
            if future.phase not in TERMINAL_PHASES:
                future.end_cancelled()  # It was cancelled before it had a row of its own.
        self._seen[workload["id"]] = seen
        return True

    def _fetch(self, ended: "queue.SimpleQueue[tuple[CallFuture[Any], Workload] | None]") -> None:
        while (item := ended.get()) is not None:
            future, workload = item
            with suppress(InvalidStateError):  # It was cancelled in the meantime.
                try:
                    body = None if workload["phase"] == "cancelled" else outcomes.fetch(self._client, workload)
                    outcomes.resolve(future, workload, body)
                except (Unreachable, Unavailable):
                    ended.put(item)
                except InvalidStateError:
                    raise
                except BaseException as error:
                    future.set_exception(error)
            if future.done():
                with self._lock:
                    for group in self._pending.values():
                        group.pop(workload["id"], None)
            del item, future, workload  # They would be kept until the next one ends.

    def _fail(self, error: Exception, workload: str | None = None) -> None:
        with self._lock:
            groups = [self._pending[workload]] if workload is not None else list(self._pending.values())
        for group in groups:
            for future in list(group.values()):
                with suppress(InvalidStateError):
                    future.set_exception(error)


def cancel_call(client: "Client", future: CallFuture[Any]) -> bool:
    """Cancel the workload of a call; return False if it has ended otherwise. Unsubmitted calls are dropped."""
    if future.workload is None:
        return True
    try:
        client.cancel(future.workload)
    except Conflict:
        return False
    return True


def indexes_of(ranges: str) -> Iterator[int]:
    """Yield the indexes of an array that are written as in its document, such as `0-9,20-29:2`."""
    for part in ranges.split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))
