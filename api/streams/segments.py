"""Reads one task's log from its region's bucket, segment by segment, with blocking calls.

A log is a sequence of objects that are named by the offset of their first byte, `<prefix>00000000000000004096.log`. An
empty object `<prefix>end` marks the end.
"""

import re
from collections.abc import Iterator

from mizzen.objects import MissingObject, ObjectStore

MAX_LINE_BYTES = 1 << 20
"""Longer lines are split: progress bars and binary output contain no line ends."""
MAX_TAIL_BYTES = 8 << 20
_SEGMENT = re.compile(r"([0-9]{20})\.log")


class TaskLog:
    """A reader with a position in one task's log. Lines are returned without their line ends."""

    def __init__(self, store: ObjectStore, prefix: str, label: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._label = label.encode()
        self._after = prefix
        """The last key that was read."""
        self._offset = 0
        self._rest = b""
        self.ended = False
        """True if the task has ended and all of its output was read."""

    def probe(self) -> None:
        """Lists one object, which raises an error if the store does not respond."""
        next(self._store.list(self._prefix), None)

    def segments(self) -> Iterator[list[bytes]]:
        """Yields the lines of each new segment."""
        for key, offset in self._new():
            body = self._get(key)
            if body is not None:
                yield self._take(offset, body)
        if self.ended:
            yield self.flush()

    def tail(self, lines: int) -> list[bytes]:
        """Moves the position to the end of the existing log, and returns its last lines."""
        keys = list(self._new())
        text, first = b"", None
        for key, offset in reversed(keys):
            body = self._get(key)
            if body is None:
                break
            text, first = body + text, offset
            if text.count(b"\n") > lines or len(text) > MAX_TAIL_BYTES:
                break
        if first is not None:
            self._offset = first  # Earlier output is skipped on purpose, so it is not reported as missing.
        found = self._take(self._offset, text) + (self.flush() if self.ended else [])
        return found[len(found) - min(lines, len(found)) :]

    def flush(self) -> list[bytes]:
        """Returns the last line if it has no line end; empty otherwise."""
        rest, self._rest = self._rest, b""
        return [self._labelled(rest)] if rest else []

    def _new(self) -> Iterator[tuple[str, int]]:
        for info in self._store.list(self._prefix, after=self._after):
            name = info.key.removeprefix(self._prefix)
            if name == "end":
                self.ended = True
                return
            match = _SEGMENT.fullmatch(name)
            if match is not None:
                self._after = info.key
                yield info.key, int(match.group(1))

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except MissingObject:
            return None  # Deleted after its retention time, while the log was being read.

    def _take(self, offset: int, body: bytes) -> list[bytes]:
        out = []
        if offset > self._offset:
            out = [*self.flush(), b"--- %d bytes of the log are missing here" % (offset - self._offset)]
        elif offset < self._offset:
            body = body[self._offset - offset :]
        self._offset = max(self._offset, offset) + len(body)
        *whole, self._rest = (self._rest + body).split(b"\n")
        out += [self._labelled(line) for line in whole]
        while len(self._rest) > MAX_LINE_BYTES:
            out.append(self._labelled(self._rest[:MAX_LINE_BYTES]))
            self._rest = self._rest[MAX_LINE_BYTES:]
        return out

    def _labelled(self, line: bytes) -> bytes:
        return self._label + line.decode("utf-8", "replace").encode()
