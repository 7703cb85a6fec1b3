"""Reads and follows logs across lost connections: each line is yielded exactly once, in order."""

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from mizzen_client.errors import Unreachable
from mizzen_client.transport import Backoff, Params, StreamBroken, Transport
from mizzen_client.views import TERMINAL_PHASES, WorkloadDetail

_KEPT = 50
"""Number of last lines of each task that are kept to find the position in its log after a lost connection."""
_SILENCE_S = 900.0
"""Timeout of a silent connection. It is long, because logs have no heartbeat and a task may print nothing for long."""
_POLL_FIRST_S = 0.25
_POLL_LONGEST_S = 3.0
_SPECIAL = frozenset(".^$*+?{}[]\\|()")
"""Characters with a special meaning in regular expressions."""


@dataclass
class FollowedTo:
    """How far a log was followed: an attempt, and how many of its lines were yielded, by the label of the task."""

    attempt: int | None = None
    seen: Counter[bytes] = field(default_factory=Counter)


class Labels(NamedTuple):
    """The labels with which the API begins lines, to name their tasks."""

    end: bytes
    """The text that ends a label; empty: lines have no labels, because all belong to one task."""
    is_by_element: bool = False
    """The logs are those of an array: all lines of one element come before those of the next, if not followed."""


def labels_of(workload: WorkloadDetail, job: str | None, task: int | None) -> Labels:
    """Return the form of the labels of these tasks."""
    if workload["array"] is not None:
        return Labels(b": ", is_by_element=True)
    tasks = [one["most_tasks"] or one["tasks"] for one in workload["jobs"] if job in (None, one["name"])]
    number = sum(tasks) if task is None else sum(task < one for one in tasks)
    return Labels(b"| " if number > 1 else b"")


def next_attempt(read: Callable[[], WorkloadDetail], number: int) -> int | None:
    """Wait for the attempt after `number` (0: for the newest). Return None if the workload ends without one."""
    pause_s = _POLL_FIRST_S
    while True:
        now = read()
        if now["attempt"] > number:
            return now["attempt"] if number == 0 else number + 1
        if now["phase"] in TERMINAL_PHASES:
            return None
        time.sleep(pause_s)
        pause_s = min(_POLL_LONGEST_S, pause_s * 1.5)


class Logs:
    """The logs of one workload.

    A log is append-only, and the lines of one task arrive in order. So the lines that were yielded are, for each task,
    a prefix of its log. After a lost connection the log is read again, and as many lines of each task are skipped as
    were yielded before.

    With a pattern, only lines that match it are yielded, and `tail` counts these. The API gets no pattern, because some
    take very long, but the text that each line must contain, if the pattern is a plain text.
    """

    def __init__(
        self, transport: Transport, path: str, params: Params, pauses: Backoff, labels: Labels,
        pattern: re.Pattern[str] | None = None,
    ) -> None:  # fmt: skip
        self._transport = transport
        self._path = path
        self._params = dict(params)
        self._pauses = pauses
        self._labels = labels
        self._pattern = pattern
        if pattern is not None and not (pattern.flags & ~re.UNICODE or _SPECIAL & set(pattern.pattern)):
            self._params["contains"] = pattern.pattern

    def now(self, attempt: int | None, tail: int | None) -> Iterator[bytes]:
        """Yield the current lines, without following."""
        return self._now(attempt, tail, Counter())

    def _now(self, attempt: int | None, tail: int | None, seen: Counter[bytes]) -> Iterator[bytes]:
        params: Params = {"attempt": attempt, "follow": "false"}
        if self._pattern is None:
            return self._resumed({**params, "tail": tail}, seen)
        found = self._matching(self._resumed(params, seen))
        return found if tail is None else self._last(found, tail)

    def follow(
        self, attempt: int | None, tail: int | None, released: Callable[[], bool], seen: Counter[bytes]
    ) -> Iterator[bytes]:
        """Yield the lines of an attempt until `released` returns true and all lines have arrived.

        The first `seen` lines of each task are skipped, and the others are counted there, without `tail`.
        """
        params: Params = {"attempt": attempt, "follow": "true"}
        if tail is not None and self._pattern is not None:
            yield from self._now(attempt, tail, seen)
        elif tail is not None:
            last: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))
            try:
                for line in self._read({**params, "tail": tail}):
                    last[self._task(line)].append(line)
                    yield line
                if released():
                    return
            except StreamBroken as error:
                self._pauses.pause(Unreachable(str(error)))
            seen = self._positions(attempt, last)
        while True:
            yield from self._matching(self._resumed(params, seen))
            if released():
                return
            # This is usual while outputs are stored.
            self._pauses.pause(Unreachable("the log ended before its attempt"), silent=True)

    def _resumed(self, params: Params, seen: Counter[bytes]) -> Iterator[bytes]:
        """Yield the lines after the first `seen` of each task, to the end of the stream. Reread a broken stream."""
        while True:
            passed: Counter[bytes] = Counter()
            try:
                for line in self._read(params):
                    task = self._task(line)
                    passed[task] += 1
                    if passed[task] > seen[task]:
                        seen[task] += 1
                        yield line
                return
            except StreamBroken as error:
                self._pauses.pause(Unreachable(str(error)))

    def _read(self, params: Params) -> Iterator[bytes]:
        with self._transport.stream(
            self._path, {**self._params, **params}, {"accept": "text/plain"}, silence_s=_SILENCE_S
        ) as lines:
            self._pauses.connected()
            for line in lines:
                self._pauses.succeeded()
                yield line

    def _positions(self, attempt: int | None, last: Mapping[bytes, deque[bytes]]) -> Counter[bytes]:
        """Return how many lines of each task the tail covered. A tail does not report the position at which it begins.

        For each task this is the last position in its log at which the lines in `last` end. For a task without lines in
        `last` it is the current length of its log.
        """
        seen: Counter[bytes] = Counter()
        come: Counter[bytes] = Counter()
        window: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))
        for line in self.now(attempt, None):
            task = self._task(line)
            seen[task] += 1
            window[task].append(line)
            if task in last and list(window[task])[-len(last[task]) :] == list(last[task]):
                come[task] = seen[task]
        return Counter({task: come[task] if task in last else seen[task] for task in seen})

    def _task(self, line: bytes) -> bytes:
        """Return the label that identifies the task of a line."""
        return line.partition(self._labels.end)[0] if self._labels.end else b""

    def _matching(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the lines whose text without the label matches the pattern, and those that the API has inserted."""
        for line in lines:
            text = line.partition(self._labels.end)[2] if self._labels.end else line
            if (
                self._pattern is None
                or self._is_inserted(line)
                or self._pattern.search(text.decode("utf-8", "replace"))
            ):
                yield line

    def _is_inserted(self, line: bytes) -> bool:
        return bool(self._labels.end) and line.startswith(b"--- ")

    def _last(self, lines: Iterator[bytes], number: int) -> Iterator[bytes]:
        """Yield the last `number` lines of each task; those of an element as soon as the next one begins."""
        kept: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=number))
        element = b""
        for line in lines:
            if self._is_inserted(line):
                yield line
                continue
            task = self._task(line)
            if self._labels.is_by_element and task.partition(b" ")[0] != element:
                element = task.partition(b" ")[0]
                yield from chain.from_iterable(kept.values())
                kept.clear()
            kept[task].append(line)
        yield from chain.from_iterable(kept.values())
