"""The queue as ranked by a scan, unchanged during the pass: in batches for the regions, and as a publication."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason
from gms.columns import QueueColumns, Rows
from gms.scan import Scan
from infra.db import published_queue
from infra.db.logs import ScanBatch


@dataclass(frozen=True)
class ScannedWorkload:
    """One queued workload of a batch."""

    workload: str
    rank: int
    gpu_types: tuple[tuple[str, ...], ...] | None
    """For each job, the GPU types for which its tenant has quota left; None: all types of its document."""
    reason: Reason | None
    """Why it is over-quota, if it is."""
    displaces: tuple[str, ...] = ()
    """Placed workloads of its tenant with a worse rank, which its award makes over-quota."""

    def to_json(self) -> list[Any]:
        """Returns the entry for regions to read."""
        reason = self.reason.to_json() if self.reason else None
        return [self.workload, self.rank, self.gpu_types, reason, self.displaces]

    @classmethod
    def from_json(cls, body: Sequence[Any]) -> "ScannedWorkload":
        """Parses the result of `to_json`."""
        workload, rank, types, reason, displaces = body
        narrowed = None if types is None else tuple(tuple(t) for t in types)
        return cls(workload, int(rank), narrowed, Reason.from_json(reason) if reason else None, tuple(displaces))


class ScannedQueue:
    """The order of the queue at a scan, independent of later changes."""

    def __init__(self, number: int, now_s: float, scan: Scan) -> None:
        self.number = number
        self.now_s = now_s
        self._scan = replace(scan, queue=_kept(scan.queue))

    def __len__(self) -> int:
        return len(self._scan.order)

    def batch(self, first: int, count: int) -> list[ScannedWorkload]:
        """Returns the workloads of a batch, in queue order."""
        queue, found = self._scan.queue, []
        for row in self._scan.order[first : first + count].tolist():
            ranked = self._scan.ranked(row)
            asked = tuple(job.gpu_types for job in queue.gangs[int(queue.pending.columns["wants"][row])])
            narrowed = None if ranked.gpu_types == asked else ranked.gpu_types
            found.append(ScannedWorkload(ranked.id, ranked.rank, narrowed, ranked.reason, ranked.displaces))
        return found

    def published(self) -> published_queue.PublishedQueue:
        """Returns the whole queue as a publication for other processes."""
        scan, queue = self._scan, self._scan.queue
        rank = scan.pending.rank[scan.order]
        over = scan.order[rank == OVER_QUOTA_RANK]
        types = [queue.gangs.type_name(number) for number in range(len(queue.gangs.types))]
        return published_queue.PublishedQueue(
            self.number,
            self.now_s,
            [published_queue.PublishedQuota(t.name, t.quota_gpus, t.quota_cpus_milli) for t in queue.tenants],
            types,
            queue.pending.id[scan.order],
            rank,
            scan.pending.credit[scan.order],
            queue.pending.columns["tenant"][scan.order],
            scan.pending.lacks[over],
            scan.pending.used[over],
            scan.pending.needed[over],
        )


def _kept(queue: QueueColumns) -> QueueColumns:
    kept = QueueColumns()
    kept.tenants, kept.gangs, kept.pending, kept.placed = queue.tenants, queue.gangs, Rows(), Rows()
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
