"""The queue as ranked by a scan, unchanged during the pass: in batches for the regions, and as a publication."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.array_elements import indexes_at
from domain.ids import element_id, runner_id
from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason
from domain.scheduling import JobRequest
from domain.spec import IndexRange
from gms.columns import QueueColumns, Rows
from gms.scan import Scan
from infra.db import published_queue
from infra.db.logs import ScanBatch


@dataclass(frozen=True)
class WaitingElement:
    """An element of an array, or a runner, that waits for its first placement. It has no row in the database yet."""

    array: str
    position: int
    """Of a runner: its number."""
    index: int | None
    """None: it is not an element, but a runner of the array."""

    @property
    def id(self) -> str:
        """The id of its row, when it has one."""
        return runner_id(self.array, self.position) if self.index is None else element_id(self.array, self.index)


class ArrayWindow(NamedTuple):
    """The elements of an array that a scan ranks."""

    waiting: Sequence[WaitingElement] = ()
    """Those without a row, in order."""
    throttled: frozenset[str] = frozenset()
    """The ids of the elements with a row that are queued, but that the throttle keeps out."""
    more: int = 0
    """The number of the others without a row that could be placed."""
    free: int | None = None
    """How many elements the throttle admits now; None: there is no limit."""


def read_window(array: str, window: str) -> ArrayWindow:
    """Returns what `array_window` in `arrays.sql` has written about an array."""
    body = json.loads(window)
    ranges: Sequence[IndexRange] = body["ranges"] or ()
    positions: Sequence[int] = body["positions"]
    indexes = indexes_at(ranges, positions) if ranges else repeat(None, len(positions))
    waiting = [WaitingElement(array, position, index) for position, index in zip(positions, indexes, strict=True)]
    return ArrayWindow(waiting, frozenset(body["throttled"]), body["more"], body["free"])


@dataclass(frozen=True)
class ScannedWorkload:
    """One queued workload of a batch."""

    workload: str
    """Its id; that of an element of an array, too, which gets its row when it is awarded."""
    rank: int
    gpu_types: tuple[tuple[str, ...], ...] | None
    """For each job, the GPU types for which its tenant has quota left; None: all types of its document."""
    reason: Reason | None
    """Why it is over-quota, if it is."""
    displaces: tuple[str, ...] = ()
    """Placed workloads of its tenant with a worse rank, which its award makes over-quota."""
    element: WaitingElement | None = None
    """Set if it is an element of an array without a row."""
    most_tasks: int = 0
    """Of an elastic workload within quota: the most tasks with which it stays within quota; 0: as in its document."""

    @property
    def row(self) -> str:
        """The id of the row with its demand: its own, or that of its array."""
        return self.workload if self.element is None else self.element.array

    def to_json(self) -> list[Any]:
        """Returns the entry for regions to read."""
        reason = self.reason.to_json() if self.reason else None
        element = None if self.element is None else astuple(self.element)
        return [self.workload, self.rank, self.gpu_types, reason, self.displaces, element, self.most_tasks]

    @classmethod
    def from_json(cls, body: Sequence[Any]) -> "ScannedWorkload":
        """Parses the result of `to_json`."""
        workload, rank, types, reason, displaces, element, most_tasks = body
        narrowed = None if types is None else tuple(tuple(t) for t in types)
        why = Reason.from_json(reason) if reason else None
        own = None if element is None else WaitingElement(*element)
        return cls(workload, int(rank), narrowed, why, tuple(displaces), own, int(most_tasks))


@dataclass(frozen=True)
class QueuedDemand:
    """One queued workload, for the forecast of its start."""

    id: str
    tenant: str
    rank: int
    level: int
    jobs: tuple[JobRequest, ...]
    at_s: float
    """When its wait began, in seconds since the epoch."""
    array: str | None = None
    """The array, if it is an element without a row."""


@dataclass(frozen=True)
class ArrayBacklog:
    """The elements of an array that could be placed, and that the scan does not rank."""

    array: str
    tenant: str
    jobs: tuple[JobRequest, ...]
    at_s: float
    """When their wait began, in seconds since the epoch."""
    elements: int
    free: int | None
    """How many elements the throttle admits now, including those that the scan ranks; None: there is no limit."""


class ScannedQueue:
    """The order of the queue at a scan, independent of later changes."""

    def __init__(
        self, number: int, now_s: float, scan: Scan, elements: Mapping[str, WaitingElement] = MappingProxyType({})
    ) -> None:
        """`elements`: by id, those array elements in the scan that have no row of their own in the database."""
        self._elements = elements
        self.number = number
        self.now_s = now_s
        self._scan = replace(scan, queue=_kept(scan.queue))
        self.grown: set[str] = set()
        """Tenants of whose quota a growth after this scan has taken a part, which the scan does not know."""
        self.unasked: set[str] = set()
        """Regions in which waiting workloads may have room: they were left out of the pass, or awards there failed."""

    def __len__(self) -> int:
        return len(self._scan.order)

    def batch(self, first: int, count: int) -> list[ScannedWorkload]:
        """Returns the workloads of a batch, in queue order."""
        queue, found = self._scan.queue, []
        for position, row in enumerate(self._scan.order[first : first + count].tolist(), first):
            ranked = self._scan.ranked(position)
            asked = tuple(job.gpu_types for job in queue.gangs[int(queue.pending.columns["wants"][row])])
            narrowed = None if ranked.gpu_types == asked else ranked.gpu_types
            element = self._elements.get(ranked.id)
            fields = ranked.id, ranked.rank, narrowed, ranked.reason, ranked.displaces, element, ranked.most_tasks
            found.append(ScannedWorkload(*fields))
        return found

    def most_tasks(self, tenant: str, rank: int, job: JobRequest, gpu_type: str | None) -> int:
        """Returns the most tasks of a placed elastic job with which its rank, and those of others, stay as they are.

        `job` has the tasks that it has now.
        """
        if rank >= OVER_QUOTA_RANK:
            return job.most_tasks
        return job.tasks + self._scan.more_tasks(tenant, job, [] if gpu_type is None else [gpu_type])

    def demands(self, most: int) -> list[QueuedDemand]:
        """Returns the first workloads in queue order, at most `most`."""
        queue, rank = self._scan.queue, self._scan.pending.rank
        columns = queue.pending.columns
        wants, requested = columns["wants"], columns["requested_level"]
        return [
            QueuedDemand(
                queue.pending.name(row), tenant.name, int(rank[row]), max(tenant.level, int(requested[row])),
                queue.gangs[int(wants[row])], float(queue.pending.at_s[row]),
                None if (element := self._elements.get(queue.pending.name(row))) is None else element.array,
            )
            for row in self._scan.order[:most].tolist()
            for tenant in [queue.tenants[columns["tenant"][row]]]
        ]  # fmt: skip

    def published(self, starts_s: npt.NDArray[np.float64] | None = None) -> published_queue.PublishedQueue:
        """Returns the whole queue as a publication for other processes. An array has its first element's place.

        `starts_s` has the interval of each of `demands`, in seconds since the scan; None: they are unknown.
        """
        scan, queue = self._scan, self._scan.queue
        ids, positions = self._without_later_elements()
        order = scan.order[positions]
        starts = np.full((len(scan.order), 2), np.nan)
        if starts_s is not None:
            starts[: len(starts_s)] = starts_s
        rank = scan.pending.rank[order]
        shortfalls = scan.shortfalls(order[rank >= OVER_QUOTA_RANK])
        types = [queue.gangs.type_name(number) for number in range(len(queue.gangs.types))]
        return published_queue.PublishedQueue(
            self.number,
            self.now_s,
            [published_queue.PublishedQuota(t.name, t.quota_gpus, t.quota_cpus_milli) for t in queue.tenants],
            types,
            ids,
            rank,
            scan.pending.place_credit[scan.places[positions]],
            scan.preference(order),
            queue.pending.columns["tenant"][order],
            shortfalls[:, 0].astype(np.int16),
            shortfalls[:, 1],
            shortfalls[:, 2],
            starts[positions].astype(np.float32).ravel(),
        )

    def _without_later_elements(self) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]]:
        """Returns the published ids, and their positions in the queue, both in queue order."""
        order = self._scan.order
        ids: npt.NDArray[np.bytes_] = self._scan.queue.pending.id[order]
        if not self._elements:
            return ids, np.arange(len(order))
        keep, seen = np.ones(len(order), np.bool_), set[str]()
        for place, id_ in enumerate(ids.tolist()):
            if (element := self._elements.get(id_.decode())) is not None:
                keep[place] = element.array not in seen
                ids[place] = element.array.encode()
                seen.add(element.array)
        return ids[keep], np.flatnonzero(keep)


def _kept(queue: QueueColumns) -> QueueColumns:
    kept = QueueColumns()
    kept.tenants, kept.gangs, kept.pending, kept.placed = queue.tenants, queue.gangs, Rows(), Rows()
    kept.numbers = dict(queue.numbers)
    for own, rows in ((kept.pending, queue.pending), (kept.placed, queue.placed)):
        own.at_s, own.id = rows.at_s.copy(), rows.id.copy()
        own.columns = {name: np.copy(column) for name, column in rows.columns.items()}
    return kept


def put_batch(session: Session, scan: int, first: int, entries: Sequence[ScannedWorkload]) -> None:
    """Writes a batch for the regions to read."""
    row = insert(ScanBatch).values(scan=scan, first=first, entries=[e.to_json() for e in entries])
    session.execute(row.on_conflict_do_nothing())


def batch(session: Session, scan: int, first: int) -> list[ScannedWorkload]:
    """Returns the entries of a batch; none if it is gone, because of a newer scan or a crash of Postgres."""
    found = session.scalar(select(ScanBatch.entries).where(ScanBatch.scan == scan, ScanBatch.first == first))
    return [ScannedWorkload.from_json(body) for body in found or ()]
