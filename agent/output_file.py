"""Reads one output file of a task in segments, and frees its disk space (`agent.logs`)."""

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from agent.secret_masks import Masker
from domain.log_segments import TaskOutput

MAX_SEGMENT_BYTES = 1 << 20
MISSING = b"\nmizzen: output is missing here: it was more than is kept (tasks.output_bytes, tasks.log_bytes)\n"
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, in bytes."""
_PUNCH_HOLE = 0x01 | 0x02
"""Flags of fallocate(2) that free the disk space of a range without changing the file's size."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


class Piece(NamedTuple):
    """The next segment of a file."""

    text: bytes
    """The masked content; empty: there is not enough output for a segment."""
    size: int
    """Number of bytes of the file that it covers."""
    more: bool
    """Whether there is enough output for another segment."""


class OutputFile:
    """One file with output of a task, and how much of it was shipped. The caller serialises the calls."""

    def __init__(self, path: Path, output: TaskOutput, masker: Masker, body: dict[str, Any]) -> None:
        """`body` is what `to_json` returned, or empty."""
        self._path = path
        self.output = output
        self._masker = masker
        self._seen_bytes = -1  # Size of the file at the last read.
        self._raw: int = body.get("raw", 0)  # Number of bytes of the file that were shipped.
        self._cut: int = body.get("cut", 0)  # Number of bytes of the file in the segment that is being uploaded.
        self._gap: list[int] | None = body.get("gap")  # Range (end exclusive) of the file that is never shipped.

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        return {"raw": self._raw, "cut": self._cut, "gap": self._gap}

    def changed_at_ns(self) -> int:
        """Returns when the file was last written to; 0: it does not exist."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def used_bytes(self) -> int:
        """Returns the file's disk space."""
        try:
            return self._path.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def is_silent(self) -> bool:
        """Whether all output so far was shipped. Reads only the file's size, so it does not block."""
        try:
            return self._gap is None and self._path.stat().st_size == self._raw
        except FileNotFoundError:
            return True

    def shipped(self, piece: Piece) -> None:
        """Moves the position behind a segment that was uploaded."""
        self._raw, self._cut = self._raw + piece.size, 0
        if piece.size == 0 and self._gap is not None:
            self._raw, self._gap = self._gap[1], None

    def bound(self, limit_bytes: int, changing: AbstractContextManager[Any], save: Callable[[], None]) -> None:
        """Limits the file's disk space to about `limit_bytes`, by freeing parts of the file.

        Holds `changing` while it changes the state, and calls `save` before it frees output that was not shipped.

        Raises:
            OSError: the file system cannot free parts of files, or `save` raises it.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            if status.st_blocks * _BLOCK_BYTES <= limit_bytes:
                return
            with changing:
                if status.st_size < self._raw:
                    return  # The task truncated its output: `next` restarts at the beginning of the file.
                if status.st_size - self._raw > limit_bytes:
                    first = self._raw + self._cut if self._gap is None else self._gap[0]
                    self._gap = [first, max(first, status.st_size - limit_bytes // 2)]
                    save()
                freed = [[0, self._raw]] if self._gap is None else [[0, self._raw], self._gap]
                for first, last in freed:
                    # Keep the last bytes: they may be the beginning of a secret, and are needed to mask its end.
                    _free(descriptor, first, last - first - self._masker.longest)
        finally:
            os.close(descriptor)

    def next(self, segment_bytes: int, *, final: bool) -> Piece:
        """Returns the next segment; the same one until `shipped` is called. `final`: the file does not grow any more.

        `segment_bytes` is enough output for another segment.
        """
        if self._gap is not None and self._raw == self._gap[0]:
            return Piece(MISSING, 0, True)
        context, text = self._pending(self._cut or MAX_SEGMENT_BYTES + self._masker.longest + 1)
        cut = self._cut = self._cut or self._next_cut(text, final)
        segment = self._masker.mask(context + text[:cut], len(context)) if cut else b""
        return Piece(segment, cut, len(text) - cut >= segment_bytes)

    def _next_cut(self, text: bytes, final: bool) -> int:
        full = len(text) > MAX_SEGMENT_BYTES
        # An incomplete line that has stopped growing, such as a prompt or a progress bar, is shipped.
        grows = self._raw + len(text) != self._seen_bytes
        self._seen_bytes = self._raw + len(text)
        cut = self._masker.cut(text, final=final and not full, whole_lines=True)
        if cut == 0 and (full or not grows):
            cut = self._masker.cut(text, final=False, whole_lines=False)
        # The whole segment consists of overlapping secrets: ship one mask for all of it.
        return len(text) if cut == 0 and full else cut

    def _pending(self, size: int) -> tuple[bytes, bytes]:
        """Returns the last shipped bytes, as many as may be the beginning of a secret, and up to `size` next bytes."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b"", b""
        try:
            if os.fstat(descriptor).st_size < self._raw:
                # The task truncated its output file, so all content of the file is new.
                self._raw, self._cut, self._gap = 0, 0, None
            known = min(self._raw, max(0, self._masker.longest - 1))
            found = os.pread(descriptor, known + size, self._raw - known)
            return found[:known], found[known:]
        finally:
            os.close(descriptor)


def _free(descriptor: int, first: int, size: int) -> None:
    if size > 0 and _libc.fallocate(descriptor, _PUNCH_HOLE, first, size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
