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

With `output: separate`, the task has a file for each of stdout and stderr. A segment has output of one of them, and the
suffix of its name is `out` or `err`. Segments follow each other as they are read from the files, about once a second:
of the output of a shorter time, that of the file comes first whose last output is older.

A task may print without limit while the bucket is unavailable. `LogStream.bound` limits how much output of each task is
on the machine's disk. It first frees the part that was shipped, then the oldest part that was not. The stream contains
the line `agent.output_file.MISSING` in place of output that was freed before it was shipped.

A task may also print without limit while the bucket is available. When the stream has `tasks.log_bytes`, shipping stops
until the task has ended. Then the end of the output is shipped, because it explains how the task ended.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from agent import tasks
from agent.output_file import OutputFile, Piece
from agent.secret_masks import Masker
from agent.tasks import RunFolder, TaskState
from domain.ids import log_prefix
from domain.launch import LogLaunch
from domain.log_segments import END, Segment, TaskOutput
from mizzen.objects import ObjectStore

_BOUND_EVERY_S = 1.0
_END_BYTES = 16 << 20
"""Of more output than this that waits when a stream over its limit ends, the last half of this is shipped."""
_UNLIMITED = 1 << 62
_log = logging.getLogger(__name__)


class LogStream:
    """Ships the output of one task. Its methods block. `bound` may be called while another thread calls `ship`."""

    def __init__(
        self,
        run: RunFolder,
        open_store: Callable[[], ObjectStore],
        masker: Masker,
        settings: LogLaunch,
        log_bytes: int = _UNLIMITED,
    ) -> None:
        """`open_store` is called by `ship` before the first upload, and `ship` raises its exceptions.

        `log_bytes` limits the size of the stream, without its end.
        """
        self._run = run
        self._open_store = open_store
        self._store: ObjectStore | None = None
        self._settings = settings
        self._log_bytes = log_bytes
        self._prefix = log_prefix(run.workload_id, run.attempt, run.job, run.task)
        self._changing = threading.Lock()  # Guards the fields below and ship.json; not held during an upload.
        body = _read_state(run.path)
        self._offset: int = body["offset"]  # Number of bytes of the masked stream that were shipped.
        self._at_ms: int = body["at_ms"]  # Time of the segment that is being uploaded; 0: none is.
        self.done = self._is_closed = bool(body["done"])  # Closed: nothing is written to the folder any more.
        # The shim has created the second file before the task began, if the task has one.
        outputs = {TaskOutput.BOTH: run.output}
        if run.errors.exists():
            outputs = {TaskOutput.STDOUT: run.output, TaskOutput.STDERR: run.errors}
        self._files = [OutputFile(path, name, masker, body["files"].get(name, {})) for name, path in outputs.items()]
        self._current: TaskOutput | None = body["current"]  # The file with the segment that is being uploaded.

    def is_silent(self) -> bool:
        """Whether all output so far was shipped. Reads only the file's size, so it does not block."""
        return all(file.is_silent() for file in self._files)

    def ship(self, *, final: bool) -> bool:
        """Ships one segment of each file with enough output for one. Returns whether to call it again without a pause.

        `final` says that the task ended before this call, so the output is complete.
        """
        if self.done:
            return False
        if self._offset >= self._log_bytes:
            if not final:
                return False
            with contextlib.suppress(OSError):  # Only the space was not freed; an error in writing the state recurs.
                self.bound(_END_BYTES)
        # First a segment whose upload has begun, then the file whose last output is older.
        files = sorted(self._files, key=lambda file: (file.output != self._current, file.changed_at_ns()))
        shipped = [piece for file in files if (piece := self._ship(file, final=final)).text]
        if final and not shipped:
            self._put(self._prefix + END, b"")
            with self._changing:
                self.done = True
                self._save()
            return False
        return final or any(piece.more for piece in shipped)

    def _ship(self, file: OutputFile, *, final: bool) -> Piece:
        with self._changing:
            piece = file.next(self._settings.segment_bytes, final=final)
            if piece.text:
                self._current, self._at_ms = file.output, self._at_ms or time.time_ns() // 1_000_000
                self._save()
        if piece.text:
            self._put(self._prefix + Segment(self._offset, self._at_ms, file.output).name, piece.text)
            with self._changing:
                file.shipped(piece)
                self._offset, self._current, self._at_ms = self._offset + len(piece.text), None, 0
                self._save()
        return piece

    def bound(self, limit_bytes: int) -> None:
        """Limits the output's disk space to about `limit_bytes`, by freeing parts of the files.

        Raises:
            OSError: the file system cannot free parts of files, or has no space for `ship.json`.
        """
        for file in self._files:
            file.bound(limit_bytes // len(self._files), self._changing, self._save)

    def used_bytes(self) -> int:
        """Returns the disk space of the output on this machine."""
        return sum(file.used_bytes() for file in self._files)

    def changed_at_ns(self) -> int:
        """Returns when the task has last written output."""
        return max(file.changed_at_ns() for file in self._files)

    def _put(self, key: str, body: bytes) -> None:
        if self._store is None:
            self._store = self._open_store()
        self._store.put(key, body)

    def _save(self) -> None:
        if self._is_closed:  # The folder may be removed at this moment.
            return
        # Not synced: a restarted agent sees the data without it, and after a crash of the machine nothing is shipped.
        body: dict[str, Any] = {"offset": self._offset, "at_ms": self._at_ms}
        body |= {"current": self._current, "done": self.done}
        body["files"] = {file.output: file.to_json() for file in self._files}
        temporary = self._run.path / "ship.json.tmp"
        temporary.write_text(json.dumps(body))
        temporary.replace(self._run.path / "ship.json")
        self._is_closed = self.done


def shipped(run: RunFolder) -> bool:
    """Whether all output of the task was shipped, including the `end` object."""
    return bool(_read_state(run.path)["done"])


def _read_state(path: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads((path / "ship.json").read_bytes())
    except (FileNotFoundError, ValueError):  # Empty after a power failure: the same segments are uploaded again.
        return {"offset": 0, "at_ms": 0, "current": None, "done": False, "files": {}}
    return body


def _is_empty(run: RunFolder) -> bool:
    """Returns whether the task has written nothing yet."""
    for path in (run.output, run.errors):
        with contextlib.suppress(FileNotFoundError):  # Also if the folder is removed at this moment.
            if path.stat().st_size:
                return False
    return True


def _ship(stream: LogStream | None, make: Callable[[], LogStream], *, final: bool) -> tuple[LogStream, bool]:
    """Calls `LogStream.ship` on `stream`, or on a new stream if it is None. Blocks."""
    stream = stream or make()
    return stream, stream.ship(final=final)


def _bound(runs: Sequence[tuple[RunFolder, Callable[[], LogStream]]], limit_bytes: int) -> None:
    """Limits the disk space of the output of runs together; the newest output is kept. Blocks.

    A run may have output but no stream yet, because its upload waits behind uploads that hang.
    """
    left_bytes = limit_bytes
    streams = [make() for run, make in runs if not _is_empty(run)]
    for stream in sorted(streams, key=LogStream.changed_at_ns, reverse=True):
        stream.bound(left_bytes)
        left_bytes = max(0, left_bytes - stream.used_bytes())


class _OneStream:
    """Creates the stream of a run at the first call; later calls return it. Threads may call it concurrently.

    It holds the stream, so the stream of a forgotten run lives until the last thread stops bounding its output.
    """

    def __init__(self, make: Callable[[], LogStream]) -> None:
        self._make = make
        self._made: LogStream | None = None
        self._making = threading.Lock()

    def __call__(self) -> LogStream:
        with self._making:
            self._made = self._made or self._make()
            return self._made


class Shipping:
    """Ships the output of the runs passed to `watch` until all of it is in the bucket, with an asyncio task per run."""

    def __init__(self, executor: Executor, output_bytes: int, log_bytes: int = _UNLIMITED) -> None:
        """`output_bytes` limits the disk space of each run's output on this machine, or of all elements of a runner.

        `log_bytes`: that of `LogStream`.
        """
        self._executor = executor
        self._output_bytes = output_bytes
        self._log_bytes = log_bytes
        self._shippers: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, tuple[RunFolder, Path, Callable[[], LogStream]]] = {}
        """Maps each shipping task to its run, the folder that shares the disk limit, and the factory of its stream."""
        self._bounding: asyncio.Task[None] | None = None

    def watch(
        self,
        run: RunFolder,
        open_store: Callable[[], ObjectStore],
        masker: Masker,
        settings: LogLaunch,
        *,
        removes: bool = False,
    ) -> None:
        """Starts shipping the output of a run that was started or has ended. Idempotent.

        `removes`: the folder of the run is removed when all of its output is shipped.
        """
        if run.run_id not in self._shippers and not shipped(run):
            make = _OneStream(partial(LogStream, run, open_store, masker, settings, self._log_bytes))
            self._runs[run.run_id] = run, run.path.parent if removes else run.path, make
            task = asyncio.create_task(self._ship(run, make, settings.interval_s), name=f"ship {run.run_id}")
            self._shippers[run.run_id] = task
            task.add_done_callback(lambda _: self._forget(run, removes=removes))
            if self._bounding is None or self._bounding.done():
                self._bounding = asyncio.create_task(self._bound(), name="bound outputs")

    def _forget(self, run: RunFolder, *, removes: bool) -> None:
        self._shippers.pop(run.run_id, None)
        self._runs.pop(run.run_id, None)
        if removes and shipped(run):
            shutil.rmtree(run.path, ignore_errors=True)

    async def _bound(self) -> None:
        """Limits the disk space of outputs while any are shipped. Uses a separate thread, because uploads may block."""
        complained: set[Path] = set()
        while self._shippers:
            await asyncio.sleep(_BOUND_EVERY_S)
            together: dict[Path, list[tuple[RunFolder, Callable[[], LogStream]]]] = defaultdict(list)
            for run, folder, make in self._runs.values():
                together[folder].append((run, make))
            for folder, runs in together.items():
                try:
                    await asyncio.to_thread(_bound, runs, self._output_bytes)
                except OSError as error:
                    if folder not in complained:
                        _log.warning(
                            "output in %s cannot be limited to %d bytes: %r", folder, self._output_bytes, error
                        )
                        complained.add(folder)

    async def close(self) -> None:
        """Stops shipping. The next agent ships the rest."""
        running = [*self._shippers.values(), *filter(None, [self._bounding])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _ship(self, run: RunFolder, make: Callable[[], LogStream], interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        stream: LogStream | None = None
        failures = 0
        while stream is None or not stream.done:
            pause_s = interval_s
            try:
                state = tasks.inspect(run)
                if state is TaskState.LOST:
                    await loop.run_in_executor(self._executor, tasks.end_lost, run)
                    continue
                if state is TaskState.RUNNING and (_is_empty(run) if stream is None else stream.is_silent()):
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
