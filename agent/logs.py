"""Shipping of tasks' output to the region's bucket, with secrets masked.

Format. The output of one task of one attempt is a stream of bytes: what the task wrote, with every secret value
replaced by `***`. It is in the bucket as segments under `domain.ids.log_prefix`:

    <prefix>00000000000000000000.log     the first segment
    <prefix>00000000000000065536.log     the one that starts at byte 65536 of the stream
    <prefix>end                          empty; written after the last segment, when the task has ended

The name is the offset, 20 digits, of the segment's first byte in the stream, so keys sort in order and a segment ends
where the next begins. A segment is never empty, never changes, and ends with a whole line where the task writes lines.
A reader that has `offset` bytes lists the keys after the segment that it read last and goes on; it is finished when it
sees `end`. A task that was stopped before it started has `end` alone.

Before a segment is put, what it will hold is written to `ship.json`; after, that it is there. So a restarted agent puts
an unfinished segment again, byte for byte, and goes on after it: no gaps, no duplicates. A put that fails is tried
again for as long as the agent lives; the task never notices.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from agent import tasks
from agent.launch import LogLaunch
from agent.sealed import Secrets
from agent.tasks import RunFolder, State
from domain.ids import log_prefix
from mizzen.objects import ObjectStore

MASK = b"***"
MAX_SEGMENT_BYTES = 1 << 20
_MIN_LINE_BYTES = 8
_log = logging.getLogger(__name__)


class Masker:
    """Replaces secret values in a stream of bytes that is seen piece by piece."""

    def __init__(self, values: Iterable[str]) -> None:
        found = set()
        for value in values:
            found.add(value.encode())
            # A key of several lines is often printed line by line, between other things.
            found.update(line for line in value.encode().splitlines() if len(line) >= _MIN_LINE_BYTES)
        self._values = tuple(sorted(value for value in found if value))
        self.longest = max(map(len, self._values), default=0)

    @classmethod
    def of(cls, secrets: Secrets) -> "Masker":
        """For all secrets of all jobs: a task may print what it got from another."""
        return cls(value for values in secrets.values() for value in values.values())

    def mask(self, text: bytes, start: int = 0) -> bytes:
        """`text` from `start` on, masked. A value that begins before `start` and reaches over it is masked whole."""
        out = []
        for first, last in self._spans(text):
            if last > start:
                out += [text[start:first] if first > start else b"", MASK]
                start = last
        return b"".join([*out, text[start:]])

    def mask_words(self, words: str, *, is_cut: bool) -> str:
        """A short text, masked. `is_cut`: it may end in the middle of a value, whose beginning is masked too."""
        text = words.encode(errors="replace")
        end = self.cut(text, final=not is_cut, whole_lines=False)
        return (self.mask(text[:end]) + (MASK if end < len(text) else b"")).decode(errors="replace")

    def cut(self, text: bytes, *, final: bool, whole_lines: bool) -> int:
        """How much of the start of `text` may be masked and shipped without knowing what follows.

        Unless `final`, what could be the beginning of a value stays behind. With `whole_lines`, so does the last line
        if it has no end.
        """
        limit = len(text) if final else self._undecided(text)
        if whole_lines and not final:
            limit = text.rfind(b"\n", 0, limit) + 1
        for first, last in self._spans(text):
            if first < limit < last:
                limit = first
        return limit

    def _spans(self, text: bytes) -> list[tuple[int, int]]:
        """Where values are: sorted, those that overlap merged."""
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
        """Where what could become a value begins; the length of `text` if nothing could."""
        limit = len(text)
        for value in self._values:
            at = text.find(value[:1], max(0, len(text) - len(value) + 1))
            while 0 <= at < limit:
                if value.startswith(text[at:]):
                    limit = at
                at = text.find(value[:1], at + 1)
        return limit


class LogStream:
    """The shipping of one task's output. Blocking."""

    def __init__(self, run: RunFolder, store: ObjectStore, masker: Masker, settings: LogLaunch) -> None:
        self._run = run
        self._store = store
        self._masker = masker
        self._settings = settings
        self._prefix = log_prefix(run.workload_id, run.attempt, run.job, run.task)
        self._seen_bytes = -1  # Size of the file when it was last looked at.
        body = _read_state(run.path)
        self._raw: int = body["raw"]  # Bytes of the file that are shipped.
        self._offset: int = body["offset"]  # Bytes of the masked stream that they became.
        self._cut: int = body["cut"]  # Bytes of the file in the segment that is being put.
        self.done = bool(body["done"])

    def ship(self, *, final: bool) -> bool:
        """Ship one segment, if there is enough for one; returns whether there is reason to call again at once.

        `final`: the task has ended before this call, so what is there is all there will be.
        """
        if self.done:
            return False
        text = self._pending(self._cut or MAX_SEGMENT_BYTES + self._masker.longest + 1)
        cut = self._cut or self._next_cut(text, final)
        if cut:
            segment = self._masker.mask(text[:cut])
            self._save(cut=cut)
            self._store.put(f"{self._prefix}{self._offset:020d}.log", segment)
            self._raw += cut
            self._offset += len(segment)
            self._save(cut=0)
        elif final:
            self._store.put(f"{self._prefix}end", b"")
            self.done = True
            self._save(cut=0)
            return False
        return final or len(text) - cut >= self._settings.segment_bytes

    def _next_cut(self, text: bytes, final: bool) -> int:
        full = len(text) > MAX_SEGMENT_BYTES
        # A line that does not go on for a while, such as a prompt or a progress bar, is shipped without its end.
        grows = self._raw + len(text) != self._seen_bytes
        self._seen_bytes = self._raw + len(text)
        cut = self._masker.cut(text, final=final and not full, whole_lines=True)
        if cut == 0 and (full or not grows):
            cut = self._masker.cut(text, final=False, whole_lines=False)
        # Nothing but values that overlap each other, for longer than a segment: one mask for all of it.
        return len(text) if cut == 0 and full else cut

    def _pending(self, size: int) -> bytes:
        try:
            descriptor = os.open(self._run.output, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            if os.fstat(descriptor).st_size < self._raw:
                self._raw = 0  # The task truncated its own output: what it writes now is new.
                self._cut = 0
            return os.pread(descriptor, size, self._raw)
        finally:
            os.close(descriptor)

    def _save(self, *, cut: int) -> None:
        # Not synced: what a restarted agent reads is what was written, and a dead machine ships nothing more.
        self._cut = cut
        body = {"raw": self._raw, "offset": self._offset, "cut": cut, "done": self.done}
        temporary = self._run.path / "ship.json.tmp"
        temporary.write_text(json.dumps(body))
        temporary.replace(self._run.path / "ship.json")


def shipped(run: RunFolder) -> bool:
    """Whether all output of the task is in the bucket, its end included."""
    return bool(_read_state(run.path)["done"])


def _read_state(path: Path) -> dict[str, int]:
    try:
        body: dict[str, int] = json.loads((path / "ship.json").read_bytes())
    except (FileNotFoundError, ValueError):  # Empty after a power cut: the segments are put again, the same.
        return {"raw": 0, "offset": 0, "cut": 0, "done": False}
    return body


def _ship(
    stream: LogStream | None,
    run: RunFolder,
    open_store: Callable[[], ObjectStore],
    masker: Masker,
    settings: LogLaunch,
    *,
    final: bool,
) -> tuple[LogStream, bool]:
    """`LogStream.ship` of `stream`, which is made where there is none yet. Blocking."""
    stream = stream or LogStream(run, open_store(), masker, settings)
    return stream, stream.ship(final=final)


class Shipping:
    """Ships the output of every run that it is told of until it is all in the bucket: one asyncio task a run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._shippers: dict[str, asyncio.Task[None]] = {}

    def watch(self, run: RunFolder, open_store: Callable[[], ObjectStore], masker: Masker, settings: LogLaunch) -> None:
        """Ship the output of a run that was started, or has ended. Once is enough; more often does no harm."""
        if run.run_id not in self._shippers and not shipped(run):
            task = asyncio.create_task(self._ship(run, open_store, masker, settings), name=f"ship {run.run_id}")
            self._shippers[run.run_id] = task
            task.add_done_callback(lambda _: self._shippers.pop(run.run_id, None))

    async def close(self) -> None:
        """Stop shipping. What is missing is shipped by the next agent."""
        running = list(self._shippers.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _ship(
        self, run: RunFolder, open_store: Callable[[], ObjectStore], masker: Masker, settings: LogLaunch
    ) -> None:
        loop = asyncio.get_running_loop()
        stream: LogStream | None = None
        failures = 0
        while stream is None or not stream.done:
            pause_s = settings.interval_s
            try:
                state = tasks.look(run)
                if state is State.LOST:
                    await loop.run_in_executor(self._executor, tasks.settle, run)
                    continue
                ship = partial(_ship, stream, run, open_store, masker, settings, final=state is State.ENDED)
                stream, more = await loop.run_in_executor(self._executor, ship)
                if more:
                    pause_s = 0.0
                failures = 0
            except Exception as error:
                pause_s = min(30.0, 2.0**failures)
                failures += 1
                _log.warning("output of %s is not shipped yet, next try in %.0f s: %r", run.run_id, pause_s, error)
            await asyncio.sleep(pause_s)
