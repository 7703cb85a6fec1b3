"""A progress line on stderr for reading bytes. It is shown only if stderr is a terminal."""

import sys
import time

from mizzen.cli import formats

_EVERY_S = 0.2


class ProgressLine:
    """A progress line that is updated in place and removed at the end. Use it as a context manager."""

    def __init__(self, total_bytes: int) -> None:
        """Create a progress line for reading `total_bytes` bytes."""
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._shown_s = 0.0
        self._shows = sys.stderr.isatty()

    def __call__(self, size_bytes: int) -> None:
        """Add `size_bytes` to the bytes that were read."""
        self._done_bytes += size_bytes
        now_s = time.monotonic()
        if self._shows and now_s >= self._shown_s + _EVERY_S:
            self._shown_s = now_s
            print(f"\r\x1b[K{self._line()}", end="", file=sys.stderr, flush=True)

    def _line(self) -> str:
        part = min(1.0, self._done_bytes / self._total_bytes) if self._total_bytes else 1.0
        return f"{formats.size(self._done_bytes)} of {formats.size(self._total_bytes)} read, {part:.0%}"

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown_s:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
