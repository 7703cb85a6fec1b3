"""Streams the logs of all elements of an array, in the order of the indexes, with bounded memory.

Elements whose logs cannot be read are skipped, with a line that names them. Then all elements of their region are
skipped for a while.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from api.fleet.storage import STORAGE_ERRORS
from api.state import ApiState
from api.streams.hub import Follower
from api.streams.log_choice import LogChoice
from api.streams.task_log import TaskLog, all_complete, joined
from api.workloads.elements import elements_of
from domain.ids import log_prefix
from domain.phases import TERMINAL_PHASES, Phase
from infra.db.models import Attempt, Region, Workload

T = TypeVar("T")
LATE_S = 10.0
"""How long to wait for output that machines are still uploading after the end of an attempt."""
AGAIN_S = 60.0
"""How long a region is skipped after its store could not be read, in seconds."""
MOST_FOLLOWED = 1024
"""Maximum number of attempts that are followed at a time; further ones are followed when earlier ones have ended."""
_LINE_BYTES = 16 << 10
"""Longer lines are split; this also bounds the memory of each followed log."""
_AHEAD = 8
"""The number of elements of which the first lines are read in advance."""
_PAGE = 1000
_POLL_S = 2.0
_MARGIN = timedelta(seconds=60)
"""Upper bound for clock differences and for the duration of transactions, in seconds."""

_PLACED = (
    select(
        Workload.array_index, Workload.id, Attempt.attempt, Attempt.released_at.is_not(None),
        func.coalesce(Attempt.released_at > func.now() - timedelta(seconds=LATE_S), True), Region.name,
        Region.bucket_url,
    )
    .join(Attempt, Attempt.workload == Workload.id)
    .join(Region, Region.name == Attempt.region)
    .where(Workload.expired_at.is_(None))
    .order_by(Workload.array_index, Attempt.attempt)
)  # fmt: skip


class _Placed(NamedTuple):
    number: int
    """Index of the element."""
    workload: str
    attempt: int
    released: bool
    may_grow: bool
    """Whether more output may come: the attempt runs, or has ended so recently that its machines may still upload."""
    region: str
    bucket_url: str


@dataclass
class _Element:
    """One attempt of an element, with the positions in its logs."""

    placed: _Placed
    logs: list[TaskLog]
    spoke_s: float
    """When the last line was read, or the attempt was still running, on the monotonic clock."""
    is_lost: bool = False
    """Whether its logs cannot be read."""


class ArrayLogs:
    """The logs of one array for one request."""

    def __init__(self, state: ApiState, follower: Follower, choice: LogChoice) -> None:
        self._state = state
        self._follower = follower
        self._choice = choice
        self._wanted = choice.wanted()
        self._patient_until_s = time.monotonic() + LATE_S
        self._away: dict[str, float] = {}
        """Region to the time until which it is skipped, on the monotonic clock."""
        self._skipped: Counter[str] = Counter()
        """Region to the number of its elements skipped since the last message about it."""

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yields the lines of the newest attempts, and with `follow` of all later ones until the array has ended."""
        horizon = datetime.fromtimestamp(self._wanted.since_ms / 1000, UTC)
        first, live = await self._in_db(_now) - _MARGIN, dict[tuple[int, int], _Element]()
        known: set[tuple[int, int]] = set()
        async for piece in in_order(self._existing(horizon - _MARGIN, live, known), _AHEAD):
            yield piece
        yield self._say_skipped()
        while self._choice.query.follow:
            over = await self._in_db(self._has_ended)
            now = await self._in_db(_now) - _MARGIN
            found = await self._rows(_PLACED.where(or_(Attempt.released_at.is_(None), Attempt.released_at >= first)))
            known &= {(one.number, one.attempt) for one in found}
            for one in found:
                if (key := (one.number, one.attempt)) in live:
                    live[key].placed = one
                elif key not in known and len(live) < MOST_FOLLOWED:
                    live[key] = self._open(one)
                    known.add(key)
            is_complete = all((one.number, one.attempt) in known for one in found)
            first = now if is_complete else first
            async for piece in in_order(self._new(live), _AHEAD):
                yield piece
            yield self._say_skipped()
            for key in [key for key, element in live.items() if _is_over(element)]:
                del live[key]
            if (over and is_complete and not live) or not await self._follower.wait(_POLL_S):
                return

    async def _existing(
        self, horizon: datetime, live: dict[tuple[int, int], _Element], known: set[tuple[int, int]]
    ) -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
        """Yields a reader for the newest attempt of each element.

        With `follow`, attempts whose output may still grow are added to `live`, and all that were read to `known`.
        """
        follow, before, index = self._choice.query.follow, self._choice.before, Workload.array_index
        recent = or_(Attempt.released_at.is_(None), Attempt.released_at >= horizon)
        newest = _PLACED.where(Attempt.attempt == Workload.attempt, recent).limit(_PAGE)
        if before is not None:
            newest = newest.order_by(None).order_by(index.desc())
        last = -1 if before is None else before
        while found := await self._rows(newest.where(index > last if before is None else index < last)):
            last = found[-1].number
            for one in found:
                if follow and one.may_grow and len(live) >= MOST_FOLLOWED:
                    continue
                element = self._open(one)
                if follow:
                    known.add((one.number, one.attempt))
                    if one.may_grow:
                        live[one.number, one.attempt] = element
                yield self._read(element, self._choice.query.tail, final=not (follow and one.may_grow))

    async def _new(self, live: dict[tuple[int, int], _Element]) -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
        for _, element in sorted(live.items()):
            yield self._read(element, None, final=False)

    async def _read(self, element: _Element, tail: int | None, *, final: bool) -> AsyncGenerator[bytes, None]:
        """Yields the new lines of one attempt of an element; with `final`, also a last line without a line end."""
        one = element.placed
        read = partial(self._state.store_reads.run, one.bucket_url)
        if self._away.get(one.region, 0.0) > time.monotonic():
            self._skip(element)
            return
        try:
            if final and one.released and one.may_grow:
                await all_complete(element.logs, read, self._follower, self._patient_until_s)
            for log in element.logs:
                if tail is not None and (lines := await read(partial(log.tail, tail))):
                    yield joined(lines)
                segments = log.segments()
                while (found := await read(partial(next, segments, None))) is not None:
                    if found:
                        element.spoke_s = time.monotonic()
                        yield joined(found)
                if final and (rest := log.flush()):
                    yield joined(rest)
        except STORAGE_ERRORS as error:
            if self._away.get(one.region, 0.0) > time.monotonic():
                self._skip(element)
                return
            element.is_lost = True
            self._away[one.region] = time.monotonic() + AGAIN_S
            what = f"the store of region {one.region} cannot be read ({type(error).__name__}): its elements are skipped"
            yield f"--- {self._choice.name}/{one.number}: {what}\n".encode()

    def _has_ended(self, session: Session) -> bool:
        row = session.get(Workload, self._choice.workload)
        return row is None or Phase(row.phase) in TERMINAL_PHASES

    def _skip(self, element: _Element) -> None:
        element.is_lost = True
        self._skipped[element.placed.region] += 1

    def _say_skipped(self) -> bytes:
        """Returns lines that name the regions whose elements were skipped since the last call."""
        lines = [
            f"--- {number} more elements in region {region} were skipped".encode()
            for region, number in sorted(self._skipped.items())
        ]
        self._skipped.clear()
        return joined(lines)

    def _open(self, one: _Placed) -> _Element:
        store, tasks = self._state.store(one.bucket_url), self._choice.tasks
        name = f"{self._choice.name}/{one.number}" + (f"#{one.attempt}" if one.attempt > 1 else "")
        logs = [
            TaskLog(
                store, log_prefix(one.workload, one.attempt, job, task),
                f"{name} {job}/{task}: " if len(tasks) > 1 else f"{name}: ", self._wanted, _LINE_BYTES,
            )
            for job, task in tasks
        ]  # fmt: skip
        return _Element(one, logs, time.monotonic())

    async def _rows(self, query: Select[*tuple[Any, ...]]) -> list[_Placed]:
        own = query.where(elements_of(self._choice.workload))
        return await self._in_db(lambda session: [_Placed(*row) for row in session.execute(own)])

    async def _in_db(self, read: Callable[[Session], T]) -> T:
        def call() -> T:
            with self._state.transaction() as session:
                return read(session)

        return await self._state.threads.streams.run(call)


def _now(session: Session) -> datetime:
    return session.execute(select(func.now())).scalar_one()


def _is_over(element: _Element) -> bool:
    """Returns whether to stop following an attempt: its logs are complete, cannot be read, or are late."""
    if not element.placed.released:
        element.spoke_s = time.monotonic()
    return element.is_lost or all(log.ended for log in element.logs) or time.monotonic() - element.spoke_s > LATE_S


async def in_order(
    sources: AsyncGenerator[AsyncGenerator[bytes, None], None], ahead: int
) -> AsyncGenerator[bytes, None]:
    """Yields the items of one source after the other; prefetches the first item of the next `ahead` sources."""
    begun: deque[tuple[AsyncGenerator[bytes, None], asyncio.Task[bytes | None]]] = deque()
    try:
        while True:
            while len(begun) < ahead and (source := await anext(sources, None)) is not None:
                begun.append((source, asyncio.create_task(_piece(source))))
            if not begun:
                return
            source, first = begun[0]
            piece = await first
            while piece is not None:
                yield piece
                piece = await _piece(source)
            begun.popleft()
    finally:
        for _, task in begun:
            task.cancel()
        await asyncio.gather(*(task for _, task in begun), return_exceptions=True)
        for source, _ in begun:
            await source.aclose()
        await sources.aclose()


async def _piece(source: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(source, None)
