"""Follows events and logs across lost connections: each item is yielded exactly once, in order."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from mizzen.client.errors import Unreachable
from mizzen.client.transport import Backoff, Params, StreamBroken, Transport, decode
from mizzen.client.views import Event

_KEPT = 50
"""Number of last lines of each task that are kept to find the position in its log after a lost connection."""
_SILENCE_S = 900.0
"""Long, because logs have no heartbeat, unlike event streams: a task may print nothing for long."""


def events(
    transport: Transport,
    path: str,
    pauses: Backoff,
    after: str | None,
    follow: bool,
    ended: Callable[[], bool] | None,
) -> Iterator[Event]:
    """Yield the server-sent events after the one with the id `after`.

    After a lost connection, the stream is resumed after the last event received. If the server ends the stream, the
    iteration ends if `ended` returns true; else (the server restarted) the stream is resumed.
    """
    over = not follow
    while True:
        params: Params = {"follow": "false" if over else "true", "after": after}
        problem = "the stream of events ended"
        try:
            with transport.stream(path, params, {"accept": "text/event-stream"}) as lines:
                pauses.connected()
                for event in _parse(lines):
                    after = event["id"]
                    pauses.succeeded()
                    yield event
            if over:
                return
            # Read once more without following: events may lie between the last one received and the end.
            over = ended is not None and ended()
            if over:
                continue
        except StreamBroken as error:
            problem = str(error)
        pauses.pause(Unreachable(problem))


def _parse(lines: Iterator[bytes]) -> Iterator[Event]:
    """Parse an SSE stream into events. Comments and unknown fields are ignored."""
    id_, data = "", ""
    for raw in lines:
        name, _, value = raw.decode("utf-8", "replace").rstrip("\r").partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            id_ = value
        elif name == "data":
            data += value
        elif not (name or value) and data:
            yield cast(Event, {**decode(data), "id": id_})
            data = ""


class Logs:
    """The logs of one workload.

    A log is append-only, and the lines of one task arrive in order. So the lines that were yielded are, for each task,
    a prefix of its log. After a lost connection the log is read again, and as many lines of each task are skipped as
    were yielded before.
    """

    def __init__(self, transport: Transport, path: str, params: Params, pauses: Backoff) -> None:
        self._transport = transport
        self._path = path
        self._params = params
        self._pauses = pauses

    def now(self, attempt: int | None, tail: int | None) -> Iterator[bytes]:
        """Yield the current lines, without following."""
        return self._resumed({"attempt": attempt, "tail": tail, "follow": "false"}, Counter())

    def follow(self, attempt: int, tail: int | None, released: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the lines of an attempt until `released` returns true and all lines have arrived."""
        params: Params = {"attempt": attempt, "follow": "true"}
        seen: Counter[bytes] = Counter()
        if tail is not None:
            last: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))
            try:
                for line in self._read({**params, "tail": tail}):
                    last[_task(line)].append(line)
                    yield line
                if released():
                    return
            except StreamBroken as error:
                self._pauses.pause(Unreachable(str(error)))
            seen = self._positions(attempt, last)
        while True:
            yield from self._resumed(params, seen)
            if released():
                return
            self._pauses.pause(Unreachable("the log ended before its attempt"))

    def _resumed(self, params: Params, seen: Counter[bytes]) -> Iterator[bytes]:
        """Yield the lines after the first `seen` of each task, to the end of the stream. Reread a broken stream."""
        while True:
            passed: Counter[bytes] = Counter()
            try:
                for line in self._read(params):
                    task = _task(line)
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

    def _positions(self, attempt: int, last: Mapping[bytes, deque[bytes]]) -> Counter[bytes]:
        """Return how many lines of each task the tail covered. A tail does not report the position at which it begins.

        For each task this is the last position in its log at which the lines in `last` end. For a task without lines in
        `last` it is the current length of its log.
        """
        seen: Counter[bytes] = Counter()
        come: Counter[bytes] = Counter()
        window: dict[bytes, deque[bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))
        for line in self.now(attempt, None):
            task = _task(line)
            seen[task] += 1
            window[task].append(line)
            if task in last and list(window[task])[-len(last[task]) :] == list(last[task]):
                come[task] = seen[task]
        return Counter({task: come[task] if task in last else seen[task] for task in seen})


def _task(line: bytes) -> bytes:
    """Return the prefix that identifies the task of a line.

    With a single task, lines have no such prefix. The counts remain right, because equal lines give equal prefixes.
    """
    return line.partition(b"| ")[0]
