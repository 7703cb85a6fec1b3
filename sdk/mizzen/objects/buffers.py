"""Presents buffers in memory as a file, because the clouds' client libraries upload from files."""

import io
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any


class Buffers(io.RawIOBase):
    """A readable, seekable file over a sequence of buffers."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._starts = [0]
        for view in views:
            self._starts.append(self._starts[-1] + view.nbytes)
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the current position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the current position and return it. See `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._starts[-1]}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        """Read into a buffer, across the boundaries of the source buffers. See `io.RawIOBase.readinto`."""
        target = memoryview(into).cast("B")
        filled = 0
        while filled < len(target) and self._at < self._starts[-1]:
            index = bisect_right(self._starts, self._at) - 1
            inside = self._at - self._starts[index]
            piece = self._views[index][inside : inside + len(target) - filled]
            target[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._at += len(piece)
        return filled
