"""Reads one task's log from the segments in its region's bucket (`domain.log_segments`)."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from api.streams.hub import Follower
from domain.log_segments import END, Segment, TaskOutput, segment_of
from mizzen.objects import MissingObject, ObjectStore

MAX_LINE_BYTES = 1 << 20
"""Longer lines are split: progress bars and binary output contain no line ends."""
MAX_TAIL_BYTES = 8 << 20
_POLL_S = 0.2


class LogFilter(NamedTuple):
    """Which lines of a log are read."""

    since_ms: int = 0
    """Segments that were cut before this time, in milliseconds since the epoch, are skipped."""
    output: TaskOutput | None = None
    """None: stdout and stderr."""
    contains: bytes = b""
    """Only lines that contain these bytes."""
    tail_bytes: int | None = None
    """Of a tail, only the newest lines that have together at most so many bytes; None: no limit."""
    skip: int = 0
    """Number of the newest lines that a tail leaves out."""


class TaskLog:
    """A reader with a position in one task's log. Lines are returned without their line ends."""

    def __init__(
        self, store: ObjectStore, prefix: str, label: str = "", wanted: LogFilter | None = None,
        line_bytes: int = MAX_LINE_BYTES,
    ) -> None:  # fmt: skip
        self._store = store
        self._prefix = prefix
        self._label = label.encode()
        self._wanted = wanted or LogFilter()
        self._line_bytes = line_bytes
        self._after = prefix
        """The last key that was read."""
        self._offset: int | None = 0
        """Offset at which the next segment begins if none is missing; None: unknown, because segments were skipped."""
        self._rests: dict[TaskOutput, bytes] = {}
        """The incomplete last line of each output, which has no line end yet."""
        self.ended = False
        """True if the task has ended and all of its output was read."""

    def probe(self) -> None:
        """Lists one object, which raises an error if the store does not respond."""
        next(self._store.list(self._prefix), None)

    def is_complete(self) -> bool:
        """Returns whether the end marker of the log was uploaded; no segment follows it."""
        key = self._prefix + END
        return self._store.stat_all([key])[key] is not None

    def segments(self) -> Iterator[list[bytes]]:
        """Yields the lines of each new segment."""
        for key, segment in self._new():
            body = self._get(key)
            if body is not None:
                yield self._take(segment, body)
        if self.ended:
            yield self.flush()

    def tail(self, lines: int) -> list[bytes]:
        """Moves the position to the end of the existing log, and returns its last lines, or those before `skip`."""
        skip = self._wanted.skip
        found: list[tuple[Segment, bytes]] = []
        size = ends = 0
        for key, segment in reversed(list(self._new())):
            body = self._get(key)
            if body is None:
                break
            found.append((segment, body))
            size, ends = size + len(body), ends + body.count(b"\n")
            if ends > lines + skip or size > MAX_TAIL_BYTES:
                break
        self._offset = None  # Earlier output is skipped on purpose, so it is not reported as missing.
        taken = [line for segment, body in reversed(found) for line in self._take(segment, body)]
        taken += self.flush() if self.ended else []
        taken = taken[: max(0, len(taken) - skip)]
        return self._newest(taken[len(taken) - min(lines, len(taken)) :])

    def _newest(self, lines: list[bytes]) -> list[bytes]:
        """Returns the newest lines within `tail_bytes`, after a line that says so if there were more."""
        most = self._wanted.tail_bytes
        if most is None:
            return lines
        first, size = len(lines), 0
        while first and (size := size + len(lines[first - 1]) + 1) <= most:
            first -= 1
        if not first:
            return lines
        kept = lines[first:] or [lines[-1][-most:]]
        return [b"--- %solder lines are left out: the newest %d KiB are shown" % (self._label, most >> 10), *kept]

    def flush(self) -> list[bytes]:
        """Returns the last line of each output if it has no line end."""
        rests, self._rests = self._rests, {}
        return self._labelled([rest for rest in rests.values() if rest])

    def _new(self) -> Iterator[tuple[str, Segment]]:
        for info in self._store.list(self._prefix, after=self._after):
            name = info.key.removeprefix(self._prefix)
            if name == END:
                self.ended = True
                return
            segment = segment_of(name)
            if segment is None:
                continue
            self._after = info.key
            if segment.at_ms < self._wanted.since_ms or self._wanted.output not in (None, segment.output):
                self._offset = None
            else:
                yield info.key, segment

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except MissingObject:
            return None  # Deleted after its retention time, while the log was being read.

    def _take(self, segment: Segment, body: bytes) -> list[bytes]:
        out = []
        expected = segment.offset if self._offset is None else self._offset
        if segment.offset > expected:
            missing = b"--- %s%d bytes of the log are missing here" % (self._label, segment.offset - expected)
            out = [*self.flush(), missing]
        elif segment.offset < expected:
            body = body[expected - segment.offset :]
        self._offset = max(expected, segment.offset) + len(body)
        *whole, rest = (self._rests.pop(segment.output, b"") + body).split(b"\n")
        while len(rest) > self._line_bytes:
            whole.append(rest[: self._line_bytes])
            rest = rest[self._line_bytes :]
        self._rests[segment.output] = rest
        return out + self._labelled(whole)

    def _labelled(self, lines: list[bytes]) -> list[bytes]:
        text = self._wanted.contains
        return [self._label + line.decode("utf-8", "replace").encode() for line in lines if text in line]


async def all_complete(
    logs: Sequence[TaskLog], read: Callable[..., Awaitable[Any]], follower: Follower, until_s: float
) -> None:
    """Waits for the ends of logs, at most until a time on the monotonic clock.

    A reader that starts right after the end of an attempt would otherwise miss output that machines still upload.
    `read` runs a function that reads the store.
    """
    for log in logs:
        while not await read(log.is_complete):
            if time.monotonic() > until_s or not await follower.wait(_POLL_S):
                return


def joined(lines: list[bytes]) -> bytes:
    """Returns lines as one piece of text."""
    return b"".join(line + b"\n" for line in lines)
