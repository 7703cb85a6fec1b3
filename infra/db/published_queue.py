"""The queue as the last scan published it, in packed columns. Readers do not need the scheduler process."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.priority import OVER_QUOTA_RANK, level_of
from domain.reasons import Reason, ReasonCode
from infra.db.logs import Publication

NAME = "queue"
"""Name of the publication."""


@dataclass(frozen=True)
class QueuePosition:
    """The position of one workload in the queue of a scan."""

    position: int
    """Position in the queue, from 1."""
    rank: int
    level: int
    over_quota: bool
    credit: float
    preference: float
    """Bonus in the order among the workloads of its tenant and level, in units of credit."""
    reason: Reason | None
    """Why the workload is over-quota; None if it is not."""
    start_s: tuple[float, float] | None
    """The interval in which it is expected to start, in seconds since the epoch; None: no forecast."""


@dataclass(frozen=True)
class PublishedQuota:
    """A tenant's quota at the time of the scan."""

    tenant: str
    gpus: Mapping[str, int]
    cpus_milli: int | None


@dataclass(frozen=True)
class PublishedQueue:
    """The queue of one scan, as columns.

    `ids`, `rank`, `credit`, `preference` and `tenant` have a row for each position. `lacks`, `used` and `needed` have a
    row for each over-quota workload, in queue order.
    """

    scan: int
    scanned_at_s: float
    quotas: Sequence[PublishedQuota]
    types: Sequence[str]
    """Names of the GPU types; the index is the type's number."""
    ids: npt.NDArray[np.bytes_]
    rank: npt.NDArray[np.int8]
    credit: npt.NDArray[np.float64]
    preference: npt.NDArray[np.float64]
    tenant: npt.NDArray[np.int32]
    """Index of the workload's tenant in `quotas`."""
    lacks: npt.NDArray[np.int16]
    """Number of the GPU type whose quota is exceeded; `len(types)` or more means CPUs."""
    used: npt.NDArray[np.int64]
    needed: npt.NDArray[np.int64]
    starts: npt.NDArray[np.float32]
    """For each position two numbers: the first and the last second of its expected start, since the scan. NaN: nothing
    can be said."""

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _by_id(self) -> npt.NDArray[np.int64]:
        """The rows, sorted by id."""
        return np.argsort(self.ids)

    @cached_property
    def _over_before(self) -> npt.NDArray[np.int64]:
        """The number of over-quota entries before each entry."""
        over = self.rank >= OVER_QUOTA_RANK
        before: npt.NDArray[np.int64] = np.cumsum(over, dtype=np.int64) - over
        return before

    def find(self, workload: str) -> QueuePosition | None:
        """Returns a workload's position, or None if the scan did not rank it."""
        return self.find_all([workload]).get(workload)

    def find_all(self, workloads: Sequence[str]) -> dict[str, QueuePosition]:
        """Returns the positions of the workloads that the scan ranked, by id."""
        if not len(self) or not workloads:
            return {}
        wanted = np.array([workload.encode() for workload in workloads], "S")
        places = np.searchsorted(self.ids, wanted, sorter=self._by_id)
        rows = self._by_id[np.minimum(places, len(self) - 1)]
        found = sorted(set(rows[self.ids[rows] == wanted].tolist()))
        return {bytes(self.ids[row]).decode(): self.entry(row) for row in found}

    def entry(self, row: int) -> QueuePosition:
        """Returns the entry in row `row`, from 0."""
        rank = int(self.rank[row])
        over = rank >= OVER_QUOTA_RANK
        reason = self._reason(row) if over else None
        first_s, last_s = self.starts[2 * row : 2 * row + 2].tolist()
        start_s = None if isnan(first_s) else (self.scanned_at_s + first_s, self.scanned_at_s + last_s)
        return QueuePosition(
            row + 1, rank, level_of(rank), over, float(self.credit[row]), float(self.preference[row]), reason, start_s
        )

    def _reason(self, row: int) -> Reason:
        place = int(self._over_before[row])
        quota = self.quotas[int(self.tenant[row])]
        lacks, used, needed = int(self.lacks[place]), int(self.used[place]), int(self.needed[place])
        numbers: tuple[float, ...] = _cores(used), _cores(quota.cpus_milli or 0), _cores(needed)
        resource = "cpus"
        if lacks < len(self.types):
            resource = self.types[lacks]
            numbers = used, quota.gpus.get(resource, 0), needed
        names = ("tenant", "resource", "used", "quota", "needs")
        return Reason(ReasonCode.QUOTA_EXCEEDED, dict(zip(names, (quota.tenant, resource, *numbers), strict=True)))

    def of_tenant(self, tenant: str | None, after: int = 0) -> Iterable[tuple[int, str]]:
        """Returns row numbers and ids in queue order, of all workloads or only of `tenant`, behind position `after`."""
        numbers = [n for n, quota in enumerate(self.quotas) if tenant in (None, quota.tenant)]
        rows: Iterable[int] = range(after, len(self))
        if tenant is not None:
            rows = (np.flatnonzero(np.isin(self.tenant[after:], numbers)) + after).tolist()
        return ((row, bytes(self.ids[row]).decode()) for row in rows)


NOTHING = PublishedQueue(
    0, 0.0, (), (), np.empty(0, "S1"), np.empty(0, np.int8), np.empty(0), np.empty(0), np.empty(0, np.int32),
    np.empty(0, np.int16), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32),
)  # fmt: skip
_COLUMNS = ("ids", "credit", "preference", "used", "needed", "tenant", "starts", "lacks", "rank")


def publish(session: Session, queue: PublishedQueue, counters: Mapping[str, int]) -> None:
    """Replaces the published queue by `queue`, unless the published one is from a later scan.

    `counters`, the auctions' counters so far, are published with the queue.
    """
    columns = [getattr(queue, name) for name in _COLUMNS]
    body = {
        "scan": queue.scan,
        "scanned_at_s": queue.scanned_at_s,
        "quotas": [[q.tenant, dict(q.gpus), q.cpus_milli] for q in queue.quotas],
        "types": list(queue.types),
        "columns": [[c.dtype.str, len(c)] for c in columns],
        "counters": dict(counters),
    }
    new = insert(Publication).values(name=NAME, body=body, columns=b"".join(c.tobytes() for c in columns))
    session.execute(
        new.on_conflict_do_update(
            index_elements=["name"],
            set_={"body": new.excluded.body, "columns": new.excluded.columns, "at": func.clock_timestamp()},
            where=(func.coalesce(Publication.body["scan"].as_integer(), 0) <= new.excluded.body["scan"].as_integer()),
        )
    )


def progress(session: Session) -> tuple[datetime | None, dict[str, int]]:
    """Returns the time of the published scan, and the auctions' counters then; None: nothing was scanned yet."""
    asked = select(Publication.body["scanned_at_s"].as_float(), Publication.body["counters"])
    at_s, counters = session.execute(asked.where(Publication.name == NAME)).one_or_none() or (None, {})
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC), counters


def load(session: Session) -> PublishedQueue:
    """Returns the published queue, or an empty one before the first scan."""
    row = session.execute(select(Publication.body, Publication.columns).where(Publication.name == NAME)).one_or_none()
    return NOTHING if row is None or row.columns is None else _unpack(row.body, row.columns)


def _unpack(body: Mapping[str, Any], packed: bytes) -> PublishedQueue:
    columns, at = {}, 0
    for name, (kind, length) in zip(_COLUMNS, body["columns"], strict=True):
        columns[name] = np.frombuffer(packed, np.dtype(kind), length, at)
        at += columns[name].nbytes
    quotas = [PublishedQuota(*quota) for quota in body["quotas"]]
    return PublishedQueue(body["scan"], body["scanned_at_s"], quotas, body["types"], **columns)


_AT = select(Publication.at).where(Publication.name == NAME)


class Newest:
    """A cache of the published queue, which is read again only if it has changed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[object, PublishedQueue] = (None, NOTHING)

    def load(self, session: Session) -> PublishedQueue:
        """Returns the currently published queue."""
        at = session.scalar(_AT)
        with self._lock:
            if at is None:
                return NOTHING
            if self._kept[0] != at:
                self._kept = (at, load(session))
            return self._kept[1]


def _cores(cpus_milli: int) -> float:
    """Converts thousandths of a core to cores. Returns an int for whole cores: messages show `16`, not `16.0`."""
    return cpus_milli / 1000 if cpus_milli % 1000 else cpus_milli // 1000
