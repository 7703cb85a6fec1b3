"""Following events and logs over lost connections: each item once, in order."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from mizzen.client.errors import Unreachable
from mizzen.client.transport import Lost, Params, Pauses, Transport, decode
from mizzen.client.views import Event

_KEPT = 50
"""Lines of each task by which a tail finds its place again."""
_SILENCE_S = 900.0
"""Unlike streams of events, logs carry no sign of life: a task may say nothing for long."""


def events(
    transport: Transport,
    path: str,
    pauses: Pauses,
    after: str | None,
    follow: bool,
    ended: Callable[[], bool] | None,
) -> Iterator[Event]:
    """Server-sent events after the one with the id `after`. A lost connection goes on after the last one that came.

    A stream that the server ends is over if `ended` says so, and else (a restart) taken up again.
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
            # What happened between the last event and the end is fetched before this ends.
            over = ended is not None and ended()
            if over:
                continue
        except Lost as error:
            problem = str(error)
        pauses.pause(Unreachable(problem))


def _parse(lines: Iterator[bytes]) -> Iterator[Event]:
    """Events of an SSE stream; comments and unknown fields are passed over."""
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

    A log only grows, and the lines of one task come in their order. So what was yielded of an attempt is, for each
    task, the start of its log: after a lost connection as many lines of that task are passed over as had come.
    """

    def __init__(self, transport: Transport, path: str, params: Params, pauses: Pauses) -> None:
        self._transport = transport
        self._path = path
        self._params = params
        self._pauses = pauses

    def now(self, attempt: int | None, tail: int | None) -> Iterator[bytes]:
        """The lines that there are."""
        return self._resumed({"attempt": attempt, "tail": tail, "follow": "false"}, Counter())

    def follow(self, attempt: int, tail: int | None, released: Callable[[], bool]) -> Iterator[bytes]:
        """The lines of an attempt until it was `released` and all have come."""
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
            except Lost as error:
                self._pauses.pause(Unreachable(str(error)))
            seen = self._positions(attempt, last)
        while True:
            yield from self._resumed(params, seen)
            if released():
                return
            self._pauses.pause(Unreachable("the log ended before its attempt"))

    def _resumed(self, params: Params, seen: Counter[bytes]) -> Iterator[bytes]:
        """The lines after those that were `seen`, to the end of the stream; one that breaks off is read again."""
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
            except Lost as error:
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
        """How many lines of each task had come after a tail, which did not say where it began: all up to where the
        `last` of them are found latest; of a task of which none had come, all that there are now.
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
    """What tells the tasks apart. Anything else in a line of a single task does no harm: equal lines count alike."""
    return line.partition(b"| ")[0]
