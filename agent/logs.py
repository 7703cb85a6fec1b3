"""Ships the output of tasks to the region's bucket, with secrets masked.

Format: the output of one task of one attempt is a byte stream, in which every secret value is replaced by `***`. The
bucket contains it as segments under `domain.ids.log_prefix`:

    <prefix>00000000000000000000-1796083200000.log     the first segment
    <prefix>00000000000000065536-1796083201250.log     the segment that starts at byte 65536 of the stream
    <prefix>end                                        empty; written after the last segment, when the task has ended

A segment's name (`domain.log_segments`) is the offset of its first byte in the stream, with 20 digits, and the time at
which its end was read from the output. So keys sort in stream order, and a segment ends where the next begins. A
segment is never empty and never changes. It ends with a complete line if the task writes lines. To continue, a reader
lists the keys after the last segment that it has read. It is finished when it reads `end`. A task that was stopped
before its start has only `end`.

Before a segment is uploaded, its extent and time are written to `ship.json`; after the upload, `ship.json` marks it as
shipped. So a restarted agent uploads an unfinished segment again with the same bytes and name, and the stream has no
gaps or duplicates.
A failed upload is retried as long as the agent runs, without effect on the task.

A task may print without limit while the bucket is unavailable. `LogStream.bound` limits how much output of each task is
on the machine's disk. It first frees the part that was shipped, then the oldest part that was not. The stream contains
the line `MISSING` in place of output that was freed before it was shipped.
"""

import asyncio
import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from agent import tasks
from agent.sealed import Secrets
from agent.tasks import RunFolder, TaskState
from domain.ids import log_prefix
from domain.launch import LogLaunch
from domain.log_segments import END, Segment
from mizzen.objects import ObjectStore

MASK = b"***"
MAX_SEGMENT_BYTES = 1 << 20
MISSING = b"\nmizzen: output is missing here: more waited to be shipped than its machine keeps (tasks.output_bytes)\n"
_MIN_LINE_BYTES = 8
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, in bytes."""
_BOUND_EVERY_S = 1.0
_PUNCH_HOLE = 0x01 | 0x02
"""Flags of fallocate(2) that free the disk space of a range without changing the file's size."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
_log = logging.getLogger(__name__)


class Masker:
    """Replaces secret values in a byte stream that is processed in pieces."""

    def __init__(self, values: Iterable[str]) -> None:
        found = set()
        for value in values:
            found.add(value.encode())
            # A key with several lines is often printed line by line, with other text in between.
            found.update(line for line in value.encode().splitlines() if len(line) >= _MIN_LINE_BYTES)
        self._values = tuple(sorted(value for value in found if value))
        self.longest = max(map(len, self._values), default=0)

    @classmethod
    def of(cls, secrets: Secrets) -> "Masker":
        """Returns a masker for the secrets of all jobs, because a task may print a secret received from another job."""
        return cls(value for values in secrets.values() for value in values.values())

    def mask(self, text: bytes, start: int = 0) -> bytes:
        """Returns `text` from `start` on, masked. The part of a secret that begins before `start` is masked, too."""
        out = []
        for first, last in self._spans(text):
            if last > start:
                out += [text[start:first] if first > start else b"", MASK]
                start = last
        return b"".join([*out, text[start:]])

    def mask_words(self, words: str, *, is_cut: bool) -> str:
        """Returns a short text, masked. If `is_cut`, an incomplete secret at the end of the text is masked, too."""
        text = words.encode(errors="replace")
        end = self.cut(text, final=not is_cut, whole_lines=False)
        return (self.mask(text[:end]) + (MASK if end < len(text) else b"")).decode(errors="replace")

    def cut(self, text: bytes, *, final: bool, whole_lines: bool) -> int:
        """Returns how many bytes at the start of `text` can be masked before the rest of the stream is known.

        Unless `final`, this excludes a possible beginning of a secret at the end of `text`. With `whole_lines`, it also
        excludes an incomplete last line.
        """
        limit = len(text) if final else self._undecided(text)
        if whole_lines and not final:
            limit = text.rfind(b"\n", 0, limit) + 1
        for first, last in self._spans(text):
            if first < limit < last:
                limit = first
        return limit

    def _spans(self, text: bytes) -> list[tuple[int, int]]:
        """Returns the start and end of secrets in `text`, sorted, with overlapping ones merged."""
        found = []
        for value in self._values:
            at = text.find(value)
            while at >= 0:
                found.append((at, at + len(value)))
                at = text.find(value, at + 1)
        merged: list[tuple[int, int]] = []
        for first, last in sorted(found):
            if merged and first < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return merged

    def _undecided(self, text: bytes) -> int:
        """Returns where a possible beginning of a secret at the end of `text` starts; `len(text)` if there is none."""
        limit = len(text)
        for value in self._values:
            at = text.find(value[:1], max(0, len(text) - len(value) + 1))
            while 0 <= at < limit:
                if value.startswith(text[at:]):
                    limit = at
                at = text.find(value[:1], at + 1)
        return limit


class LogStream:
    """Ships the output of one task. Its methods block. `bound` may be called while another thread calls `ship`."""

    def __init__(
        self, run: RunFolder, open_store: Callable[[], ObjectStore], masker: Masker, settings: LogLaunch
    ) -> None:
        """`open_store` is called by `ship` before the first upload, and `ship` raises its exceptions."""
        self._run = run
        self._open_store = open_store
        self._store: ObjectStore | None = None
        self._masker = masker
        self._settings = settings
        self._prefix = log_prefix(run.workload_id, run.attempt, run.job, run.task)
        self._seen_bytes = -1  # Size of the file at the last read.
        self._changing = threading.Lock()  # Guards the fields below and ship.json; not held during an upload.
        body = _read_state(run.path)
        self._raw: int = body["raw"]  # Number of bytes of the file that were shipped.
        self._offset: int = body["offset"]  # Number of bytes of the masked stream that were shipped.
        self._cut: int = body["cut"]  # Number of bytes of the file in the segment that is being uploaded.
        self._at_ms: int = body.get("at_ms", 0)  # Time of the segment that is being uploaded; 0: none is.
        self._gap: list[int] | None = body.get("gap")  # Range (end exclusive) of the file that is never shipped.
        self.done = bool(body["done"])

    def is_silent(self) -> bool:
        """Whether all output so far was shipped. Reads only the file's size, so it does not block."""
        try:
            return self._gap is None and self._run.output.stat().st_size == self._raw
        except FileNotFoundError:
            return True

    def ship(self, *, final: bool) -> bool:
        """Ships one segment if there is enough output for one. Returns whether to call it again without a pause.

        `final` says that the task ended before this call, so the output is complete.
        """
        if self.done:
            return False
        with self._changing:
            segment, upto, more = self._next(final)
            if segment:
                self._at_ms = self._at_ms or time.time_ns() // 1_000_000
                self._save()
        if segment:
            self._put(self._prefix + Segment(self._offset, self._at_ms).name, segment)
            with self._changing:
                self._raw, self._cut, self._at_ms = self._raw + upto, 0, 0
                if upto == 0 and self._gap is not None:
                    self._raw, self._gap = self._gap[1], None
                self._offset += len(segment)
                self._save()
        elif final:
            self._put(self._prefix + END, b"")
            with self._changing:
                self.done = True
                self._save()
            return False
        return final or more

    def bound(self, limit_bytes: int) -> None:
        """Limits the output's disk space to about `limit_bytes`, by freeing parts of the file.

        Raises:
            OSError: the file system cannot free parts of files, or has no space for `ship.json`.
        """
        try:
            descriptor = os.open(self._run.output, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            if status.st_blocks * _BLOCK_BYTES <= limit_bytes:
                return
            with self._changing:
                if status.st_size < self._raw:
                    return  # The task truncated its output: `ship` restarts at the beginning of the file.
                if status.st_size - self._raw > limit_bytes:
                    first = self._raw + self._cut if self._gap is None else self._gap[0]
                    self._gap = [first, max(first, status.st_size - limit_bytes // 2)]
                    self._save()
                freed = [[0, self._raw]] if self._gap is None else [[0, self._raw], self._gap]
                for first, last in freed:
                    # Keep the last bytes: they may be the beginning of a secret, and are needed to mask its end.
                    _free(descriptor, first, last - first - self._masker.longest)
        finally:
            os.close(descriptor)

    def _next(self, final: bool) -> tuple[bytes, int, bool]:
        """Returns the next segment, its number of bytes in the file, and whether there is enough output for another.

        Sets `_cut`.
        """
        if self._gap is not None and self._raw == self._gap[0]:
            return MISSING, 0, True
        context, text = self._pending(self._cut or MAX_SEGMENT_BYTES + self._masker.longest + 1)
        cut = self._cut = self._cut or self._next_cut(text, final)
        segment = self._masker.mask(context + text[:cut], len(context)) if cut else b""
        return segment, cut, len(text) - cut >= self._settings.segment_bytes

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
            descriptor = os.open(self._run.output, os.O_RDONLY | os.O_CLOEXEC)
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

    def _put(self, key: str, body: bytes) -> None:
        if self._store is None:
            self._store = self._open_store()
        self._store.put(key, body)

    def _save(self) -> None:
        # Not synced: a restarted agent reads the written data anyway, and a dead machine ships nothing.
        body = {"raw": self._raw, "offset": self._offset, "cut": self._cut, "gap": self._gap, "done": self.done}
        body["at_ms"] = self._at_ms
        temporary = self._run.path / "ship.json.tmp"
        temporary.write_text(json.dumps(body))
        temporary.replace(self._run.path / "ship.json")


def _free(descriptor: int, first: int, size: int) -> None:
    if size > 0 and _libc.fallocate(descriptor, _PUNCH_HOLE, first, size) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def shipped(run: RunFolder) -> bool:
    """Whether all output of the task was shipped, including the `end` object."""
    return bool(_read_state(run.path)["done"])


def _read_state(path: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads((path / "ship.json").read_bytes())
    except (FileNotFoundError, ValueError):  # Empty after a power failure: the same segments are uploaded again.
        return {"raw": 0, "offset": 0, "cut": 0, "done": False}
    return body


def _ship(stream: LogStream | None, make: Callable[[], LogStream], *, final: bool) -> tuple[LogStream, bool]:
    """Calls `LogStream.ship` on `stream`, or on a new stream if it is None. Blocks."""
    stream = stream or make()
    return stream, stream.ship(final=final)


class Shipping:
    """Ships the output of the runs passed to `watch` until all of it is in the bucket, with an asyncio task per run."""

    def __init__(self, executor: Executor, output_bytes: int) -> None:
        """`output_bytes` limits the disk space of each run's output on this machine."""
        self._executor = executor
        self._output_bytes = output_bytes
        self._shippers: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, LogStream] = {}
        self._bounding: asyncio.Task[None] | None = None

    def watch(self, run: RunFolder, open_store: Callable[[], ObjectStore], masker: Masker, settings: LogLaunch) -> None:
        """Starts shipping the output of a run that was started or has ended. Idempotent."""
        if run.run_id not in self._shippers and not shipped(run):
            task = asyncio.create_task(self._ship(run, open_store, masker, settings), name=f"ship {run.run_id}")
            self._shippers[run.run_id] = task
            task.add_done_callback(lambda _: self._forget(run.run_id))
            if self._bounding is None or self._bounding.done():
                self._bounding = asyncio.create_task(self._bound(), name="bound outputs")

    def _forget(self, run_id: str) -> None:
        self._shippers.pop(run_id, None)
        self._streams.pop(run_id, None)

    async def _bound(self) -> None:
        """Limits the disk space of outputs while any are shipped. Uses a separate thread, because uploads may block."""
        complained: set[str] = set()
        while self._shippers:
            await asyncio.sleep(_BOUND_EVERY_S)
            for run_id, stream in list(self._streams.items()):
                try:
                    await asyncio.to_thread(stream.bound, self._output_bytes)
                except OSError as error:
                    if run_id not in complained:
                        _log.warning(
                            "output of %s cannot be limited to %d bytes: %r", run_id, self._output_bytes, error
                        )
                        complained.add(run_id)

    async def close(self) -> None:
        """Stops shipping. The next agent ships the rest."""
        running = [*self._shippers.values(), *filter(None, [self._bounding])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _ship(
        self, run: RunFolder, open_store: Callable[[], ObjectStore], masker: Masker, settings: LogLaunch
    ) -> None:
        loop = asyncio.get_running_loop()
        stream: LogStream | None = None

        def make() -> LogStream:
            self._streams[run.run_id] = stream = LogStream(run, open_store, masker, settings)
            return stream

        failures = 0
        while stream is None or not stream.done:
            pause_s = settings.interval_s
            try:
                state = tasks.inspect(run)
                if state is TaskState.LOST:
                    await loop.run_in_executor(self._executor, tasks.end_lost, run)
                    continue
                if stream is not None and state is TaskState.RUNNING and stream.is_silent():
                    await asyncio.sleep(pause_s)
                    continue
                ship = partial(_ship, stream, make, final=state is TaskState.ENDED)
                stream, more = await loop.run_in_executor(self._executor, ship)
                if more:
                    pause_s = 0.0
                failures = 0
            except Exception as error:
                pause_s = min(30.0, 2.0**failures)
                failures += 1
                _log.warning("output of %s cannot be shipped, next try in %.0f s: %r", run.run_id, pause_s, error)
            await asyncio.sleep(pause_s)
