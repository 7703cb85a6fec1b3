"""Endpoint that returns or follows the logs of a workload's tasks.

A task's log is a sequence of objects in its region's bucket that are named by the offset of their first byte,
`<prefix>00000000000000004096.log`. An empty object `<prefix>end` marks the end.
"""

import re
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated

from fastapi import Query
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, Viewer
from api.fleet.storage import STORAGE_ERRORS, storage_unavailable
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, invalid, not_found
from api.routing import Router
from api.state import ApiState, StateOf
from api.streams.hub import Follower
from api.streams.stream import Stream
from api.workloads.workload_queries import find
from domain.ids import log_prefix
from domain.phases import TERMINAL_PHASES, Phase
from infra.db.models import Attempt, Region, Workload
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


MEDIA_TYPE = "text/plain; charset=utf-8"
MAX_TASKS = 64
MAX_TAIL = 10_000
LATE_S = 10.0
"""How long to wait for output that machines are still uploading after the end of an attempt."""
_POLL_S = 0.5
_LONGEST_POLL_S = 2.0
_MAX_ATTEMPT = 1 << 62
router = Router(prefix="/v1/workloads", tags=["following"])


@dataclass(frozen=True)
class LogPosition:
    """The state of a workload, as far as it is needed to follow its logs."""

    newest: int
    """Number of the newest attempt."""
    ended: bool
    """The workload has ended: there will be no further attempt."""
    released: bool
    """The attempt whose logs are read has ended."""
    region: str | None
    bucket_url: str | None
    """Bucket with the attempt's logs; None: the attempt does not exist."""


@router.get(
    "/{id}/logs",
    response_class=StreamingResponse,
    summary="Read the logs of a workload's tasks",
    responses={
        200: {
            "description": "Lines of text. With several tasks each line begins with `job/task| `. Lines that begin "
            "with `--- ` are inserted by the server, for example at the start of another attempt.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **refusals(404, 410),
    },
)
async def logs(
    id: str,
    state: StateOf,
    caller: Viewer,
    job: Annotated[str | None, Query(description="Only tasks of this job")] = None,
    task: Annotated[int | None, Query(ge=0, le=_MAX_ATTEMPT, description="Only tasks with this index")] = None,
    attempt: Annotated[int | None, Query(ge=1, le=_MAX_ATTEMPT, description="Default: the newest")] = None,
    tail: Annotated[int | None, Query(ge=0, le=MAX_TAIL, description="Only the last lines of each task")] = None,
    follow: Annotated[bool, Query(description="Keep sending new lines until the workload has ended")] = False,
) -> Stream:
    """Returns the output of tasks from the region's bucket, also after the machines are gone."""
    tasks, newest = await run_in_threadpool(_select, state, caller, id, job, task, attempt)
    started = attempt or newest
    if started:
        try:  # Test the store first, so that an unavailable store gives an error response, not an aborted stream.
            standing = await run_in_threadpool(_position_of, state, id, started)
            for log in islice(_open(state, standing, id, started, tasks), 1):
                await state.threads.stores.run(log.probe)
        except STORAGE_ERRORS as error:
            raise storage_unavailable(error) from None
    release = state.hub.admit(caller, waits=follow)
    stream = _stream(state, caller, id, tasks, started, attempt is not None, tail, follow)
    return Stream(stream, MEDIA_TYPE, release)


def _select(
    state: ApiState, caller: Caller, workload: str, job: str | None, task: int | None, attempt: int | None
) -> tuple[list[tuple[str, int]], int]:
    """Returns the requested (job, task) pairs, and the number of the newest attempt."""
    with state.transaction() as session:
        row = find(session, caller, workload)
        if row.expired_at is not None:
            raise HttpProblem(
                ProblemType.GONE, f"the logs of workload {row.id} were deleted at {row.expired_at:%Y-%m-%d %H:%M %Z}"
            )
        if attempt is not None and session.get(Attempt, (row.id, attempt)) is None:
            raise not_found(f"attempt of workload {row.id}", str(attempt))
        jobs: dict[str, int] = {j["name"]: j["tasks"] for j in row.spec["jobs"]}
        newest = row.attempt
    if job is not None:
        if job not in jobs:
            raise invalid("query.job", f"workload {workload} has the jobs {', '.join(jobs)}", job)
        jobs = {job: jobs[job]}
    if task is not None:
        if all(task >= tasks for tasks in jobs.values()):
            raise invalid("query.task", f"must be at most {max(jobs.values()) - 1}", task)
        found = [(name, task) for name, tasks in jobs.items() if task < tasks]
    else:
        total = sum(jobs.values())
        if total > MAX_TASKS:
            raise invalid("query.task", f"{total} tasks match, but at most {MAX_TASKS} can be read at once: "
                          "select a job and a task")  # fmt: skip
        found = [(name, number) for name, tasks in jobs.items() for number in range(tasks)]
    return found, newest


def _position_of(state: ApiState, workload: str, attempt: int) -> LogPosition:
    with state.transaction() as session:
        row = session.get(Workload, workload)
        own = session.get(Attempt, (workload, attempt))
        # An element that a runner runs has no row of its attempt before its end.
        at = own.region if own is not None else row.region if row is not None and row.attempt == attempt else None
        region = session.get(Region, at) if at is not None else None
        return LogPosition(
            newest=row.attempt if row is not None else attempt,
            ended=row is None or Phase(row.phase) in TERMINAL_PHASES,
            released=(own is None and at is None) or (own is not None and own.released_at is not None),
            region=region.name if region is not None else None,
            bucket_url=region.bucket_url if region is not None else None,
        )


def _open(
    state: ApiState, standing: LogPosition, workload: str, attempt: int, tasks: list[tuple[str, int]]
) -> Iterator[TaskLog]:
    if standing.bucket_url is None:
        return
    store = state.store(standing.bucket_url)
    for job, task in tasks:
        label = f"{job}/{task}| " if len(tasks) > 1 else ""
        yield TaskLog(store, log_prefix(workload, attempt, job, task), label)


async def _stream(
    state: ApiState,
    caller: Caller,
    workload: str,
    tasks: list[tuple[str, int]],
    attempt: int,
    only_this_attempt: bool,
    tail: int | None,
    follow: bool,
) -> AsyncGenerator[bytes, None]:
    with state.hub.register(caller, workload, waits=follow) as follower:
        try:
            while True:
                async for text in _attempt(state, follower, workload, tasks, attempt, tail, follow):
                    yield text
                if not follow or only_this_attempt:
                    return
                standing = await state.threads.streams.run(partial(_position_of, state, workload, attempt))
                while standing.newest == attempt:
                    if standing.ended or not await follower.wait(_LONGEST_POLL_S):
                        return
                    standing = await state.threads.streams.run(partial(_position_of, state, workload, attempt))
                if attempt:
                    reached = await state.threads.streams.run(partial(_position_of, state, workload, standing.newest))
                    yield f"--- attempt {standing.newest} in {reached.region}\n".encode()
                attempt, tail = standing.newest, None
        except (*STORAGE_ERRORS, SQLAlchemyError) as error:
            yield f"--- the log cannot be read further: {type(error).__name__}\n".encode()


async def _attempt(
    state: ApiState,
    follower: Follower,
    workload: str,
    tasks: list[tuple[str, int]],
    attempt: int,
    tail: int | None,
    follow: bool,
) -> AsyncGenerator[bytes, None]:
    """Yields the lines of one attempt.

    With `follow`, it ends when all logs are complete, or `LATE_S` after the last output of an ended attempt.
    """
    if not attempt:
        return
    standing = await state.threads.streams.run(partial(_position_of, state, workload, attempt))
    task_logs = list(_open(state, standing, workload, attempt, tasks))
    if tail is not None:
        for log in task_logs:
            if lines := await state.threads.stores.run(partial(log.tail, tail)):
                yield _joined(lines)
    poll_s, quiet_since_s = _POLL_S, time.monotonic()
    while True:
        # The state is read before the logs, so that output written before the workload ended is not missed.
        standing = await state.threads.streams.run(partial(_position_of, state, workload, attempt))
        spoke = False
        readers = [log.segments() for log in task_logs if not log.ended]
        while readers:
            # Read one segment of each task in turn.
            for reader in list(readers):
                lines = await state.threads.stores.run(partial(next, reader, None))
                if lines is None:
                    readers.remove(reader)
                elif lines:
                    spoke = True
                    yield _joined(lines)
        over = standing.ended or standing.released or standing.newest > attempt
        quiet_since_s = time.monotonic() if spoke or not over else quiet_since_s
        late = over and time.monotonic() - quiet_since_s > LATE_S
        if not follow or all(log.ended for log in task_logs) or late:
            if rest := [line for log in task_logs for line in log.flush()]:
                yield _joined(rest)
            return
        poll_s = _POLL_S if spoke else min(_LONGEST_POLL_S, poll_s * 1.5)
        if not await follower.wait(poll_s):
            return


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
