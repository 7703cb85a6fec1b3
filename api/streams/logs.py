"""Endpoint that returns or follows the logs of the tasks of a workload, or of all elements of an array."""

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
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
from api.routing import Router
from api.state import ApiState, StateOf
from api.streams.array_logs import ArrayLogs
from api.streams.hub import Follower
from api.streams.log_choice import LogChoice, LogPosition, LogQuery, choose, position_of
from api.streams.stream import Stream
from api.streams.task_log import TaskLog, all_complete, joined
from domain.ids import log_prefix

MEDIA_TYPE = "text/plain; charset=utf-8"
LATE_S = 10.0
"""How long to wait for output that machines are still uploading after the end of an attempt."""
_POLL_S = 0.5
_LONGEST_POLL_S = 2.0
router = Router(prefix="/v1/workloads", tags=["following"])


@router.get(
    "/{id}/logs",
    response_class=StreamingResponse,
    summary="Read the logs of a workload's tasks",
    responses={
        200: {
            "description": "Lines of text. With several tasks each line begins with `job/task| `, and those of an "
            "array with `name/index: `. Lines that begin with `--- ` are inserted by the server, for example at the "
            "start of another attempt.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
        **refusals(404, 410),
    },
)
async def logs(id: str, state: StateOf, caller: Viewer, query: Annotated[LogQuery, Query()]) -> Stream:
    """Returns the output of tasks from the region's bucket, also after the machines are gone."""
    return await read_logs(id, state, caller, query)


async def read_logs(
    id: str,
    state: ApiState,
    caller: Caller,
    query: LogQuery,
    *,
    tail_bytes: int | None = None,
    skip: int = 0,
    before: int | None = None,
) -> Stream:
    """Returns the output of tasks (`logs`). The further arguments are those of `LogChoice`."""
    choice = await run_in_threadpool(choose, state, caller, id, query)
    choice = replace(choice, tail_bytes=tail_bytes, skip=skip, before=before)
    started = query.attempt or choice.newest
    if started and not choice.is_array:
        try:  # Test the store first, so that an unavailable store gives an error response, not an aborted stream.
            standing = await run_in_threadpool(position_of, state, choice.workload, started)
            for log in islice(_open(state, standing, choice, started), 1):
                await state.store_reads.run(standing.bucket_url or "", log.probe)
        except STORAGE_ERRORS as error:
            raise storage_unavailable(error) from None
    release = state.hub.admit(caller, waits=query.follow)
    return Stream(_stream(state, caller, choice), MEDIA_TYPE, release)


def _open(state: ApiState, standing: LogPosition, choice: LogChoice, attempt: int) -> Iterator[TaskLog]:
    if standing.bucket_url is None:
        return
    store = state.store(standing.bucket_url)
    for job, task in choice.tasks:
        if task >= (standing.tasks.get(job) or task + 1):
            continue  # The attempt of an elastic job has fewer tasks.
        label = f"{job}/{task}| " if len(choice.tasks) > 1 else ""
        yield TaskLog(store, log_prefix(choice.workload, attempt, job, task), label, choice.wanted())


async def _stream(state: ApiState, caller: Caller, choice: LogChoice) -> AsyncGenerator[bytes, None]:
    with state.hub.register(caller, choice.workload, waits=choice.query.follow) as follower:
        lines = ArrayLogs(state, follower, choice).lines() if choice.is_array else _attempts(state, follower, choice)
        try:
            async for text in lines:
                yield text
        except (*STORAGE_ERRORS, SQLAlchemyError) as error:
            yield f"--- the log cannot be read further: {type(error).__name__}\n".encode()
        finally:
            await lines.aclose()


async def _attempts(state: ApiState, follower: Follower, choice: LogChoice) -> AsyncGenerator[bytes, None]:
    """Yields the lines of the selected attempt, and with `follow` of the later ones if none was selected."""
    attempt, tail = choice.query.attempt or choice.newest, choice.query.tail
    position = partial(position_of, state, choice.workload)
    while True:
        async for text in _attempt(state, follower, choice, attempt, tail):
            yield text
        if not choice.query.follow or choice.query.attempt is not None:
            return
        standing = await state.threads.streams.run(partial(position, attempt))
        while standing.newest == attempt:
            if standing.ended or not await follower.wait(_LONGEST_POLL_S):
                return
            standing = await state.threads.streams.run(partial(position, attempt))
        if attempt:
            reached = await state.threads.streams.run(partial(position, standing.newest))
            yield f"--- attempt {standing.newest} in {reached.region}\n".encode()
        attempt, tail = standing.newest, None


async def _attempt(
    state: ApiState, follower: Follower, choice: LogChoice, attempt: int, tail: int | None
) -> AsyncGenerator[bytes, None]:
    """Yields the lines of one attempt.

    With `follow`, it ends when all logs are complete, or `LATE_S` after the last output of an ended attempt. Without,
    it begins when all logs of an ended attempt are complete, or `LATE_S` after its end.
    """
    if not attempt:
        return
    position = partial(position_of, state, choice.workload, attempt)
    standing = await state.threads.streams.run(position)
    task_logs = list(_open(state, standing, choice, attempt))
    read = partial(state.store_reads.run, standing.bucket_url or "")
    if not choice.query.follow and standing.ended_ago_s < LATE_S:
        await all_complete(task_logs, read, follower, time.monotonic() + LATE_S - standing.ended_ago_s)
    if tail is not None:
        for log in task_logs:
            if lines := await read(partial(log.tail, tail)):
                yield joined(lines)
    poll_s, quiet_since_s = _POLL_S, time.monotonic()
    while True:
        # The state is read before the logs, so that output written before the workload ended is not missed.
        standing = await state.threads.streams.run(position)
        spoke = False
        readers = [log.segments() for log in task_logs if not log.ended]
        while readers:
            # Read one segment of each task in turn.
            for reader in list(readers):
                found = await read(partial(next, reader, None))
                if found is None:
                    readers.remove(reader)
                elif found:
                    spoke = True
                    yield joined(found)
        over = standing.ended or standing.released or standing.newest > attempt
        quiet_since_s = time.monotonic() if spoke or not over else quiet_since_s
        late = over and time.monotonic() - quiet_since_s > LATE_S
        if not choice.query.follow or all(log.ended for log in task_logs) or late:
            if rest := [line for log in task_logs for line in log.flush()]:
                yield joined(rest)
            return
        poll_s = _POLL_S if spoke else min(_LONGEST_POLL_S, poll_s * 1.5)
        if not await follower.wait(poll_s):
            return
