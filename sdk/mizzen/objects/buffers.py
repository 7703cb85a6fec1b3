"""Buffers in memory as a file, which is what the clouds' libraries upload from."""

import io
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any


class Buffers(io.RawIOBase):
    """Buffers one after the other as a file that can be read and gone back in."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._starts = [0]
        for view in views:
            self._starts.append(self._starts[-1] + view.nbytes)
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._starts[-1]}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        """See `io.RawIOBase.readinto`: as much as fits, over the ends of buffers."""
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
