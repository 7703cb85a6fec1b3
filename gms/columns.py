"""The queue as columns, kept up to date from the change log: one row a workload, in an order that a scan can walk.

Rows are in the order (submitted, id) for what is pending and (awarded, id) for what is placed. Credit falls with the
time of submission within a tenant, so neither a scan nor a change ever has to sort a tenant's workloads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from domain.scheduling import PlacedWorkload, QueuedWorkload, QueueSnapshot, TenantState
from gms.demand import Gangs, Holdings

Array = npt.NDArray[Any]
Key = tuple[float, str]
W = TypeVar("W", PlacedWorkload, QueuedWorkload)
_FIELDS = {"tenant": np.int32, "requested_level": np.int8, "held": np.bool_, "wants": np.int32}


class Rows:
    """Workloads by (time, id). `wants` is the number of the gang that it asks for, or of what it holds."""

    def __init__(self) -> None:
        self.at_s: npt.NDArray[np.float64] = np.empty(0)
        self.id: Array = np.empty(0, "S1")
        """UTF-8; it sorts as the ids do."""
        self.columns: dict[str, Array] = {name: np.empty(0, kind) for name, kind in _FIELDS.items()}

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.at_s.nbytes + self.id.nbytes + sum(column.nbytes for column in self.columns.values())

    def name(self, row: int) -> str:
        """A row's workload."""
        return str(bytes(self.id[row]).decode())

    def find(self, at_s: npt.NDArray[np.float64], ids: Array) -> tuple[Array, Array]:
        """For each key the row where it is or belongs, and whether it is there."""
        first, after = np.searchsorted(self.at_s, at_s, "left"), np.searchsorted(self.at_s, at_s, "right")
        place = first.copy()
        for k in np.flatnonzero(after > first):  # Ties of time are few, or all at one time.
            place[k] += np.searchsorted(self.id[first[k] : after[k]], ids[k], "left")
        inside = place < after
        there = np.zeros(len(place), np.bool_)
        there[inside] = self.id[place[inside]] == ids[inside]
        return place, there

    def change(self, gone: Iterable[Key], new: Mapping[Key, tuple[int, int, bool, int]]) -> None:
        """Takes rows out, and puts others in or in the place of those with the same key.

        A row's values are (tenant, requested_level, held, wants), in the order of the columns.
        """
        keep = np.ones(len(self), np.bool_)
        leaving = list(gone)
        if leaving:
            place, there = self.find(*_keys(leaving))
            keep[place[there]] = False
        keys = sorted((at_s, id_.encode()) for at_s, id_ in new)
        values = [new[at_s, id_.decode()] for at_s, id_ in keys]
        fresh: dict[str, Array] = {
            name: np.array([v[i] for v in values], kind) for i, (name, kind) in enumerate(_FIELDS.items())
        }
        at_s, ids = _arrays(keys)
        place, there = self.find(at_s, ids)
        for name, column in self.columns.items():
            column[place[there]] = fresh[name][there]
        keep[place[there]] = True
        if keep.all() and there.all():
            return
        before = np.concatenate(([0], np.cumsum(keep)))  # How many rows that stay are before a row.
        slots = before[place[~there]]
        self.at_s = np.insert(self.at_s[keep], slots, at_s[~there])
        width = np.promote_types(self.id.dtype, ids.dtype)
        self.id = np.insert(self.id[keep].astype(width, copy=False), slots, ids[~there])
        for name, column in self.columns.items():
            self.columns[name] = np.insert(column[keep], slots, fresh[name][~there])


def _keys(keys: Iterable[Key]) -> tuple[npt.NDArray[np.float64], Array]:
    return _arrays([(at_s, id_.encode()) for at_s, id_ in keys])


def _arrays(keys: list[tuple[float, bytes]]) -> tuple[npt.NDArray[np.float64], Array]:
    return np.array([at_s for at_s, _ in keys], np.float64), np.array([id_ for _, id_ in keys] or [b""], "S")[
        : len(keys)
    ]


@dataclass(frozen=True)
class QueueChange(Generic[W]):
    """One workload's news: what it is now, or None where it is no longer pending (placed), and its time as it was."""

    at_s: float
    id: str
    now: W | None


class QueueColumns:
    """Tenants, pending and placed workloads. Changed by `apply`; scanned by `gms.scan.scan_queue`."""

    def __init__(self) -> None:
        self.tenants: tuple[TenantState, ...] = ()
        self.numbers: dict[str, int] = {}
        """Tenant to number."""
        self.gangs = Gangs()
        self.holdings = Holdings(self.gangs)
        self.pending = Rows()
        self.placed = Rows()

    @classmethod
    def of(cls, snapshot: QueueSnapshot) -> "QueueColumns":
        """A queue that holds what a snapshot does.

        Raises:
            ValueError: a workload names a tenant that the snapshot lacks.
        """
        queue = cls()
        queue.set_tenants(snapshot.tenants)
        queue.apply(
            [QueueChange(w.submitted_at_s, w.id, w) for w in snapshot.pending],
            [QueueChange(w.awarded_at_s, w.id, w) for w in snapshot.placed],
        )
        return queue

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Takes the tenants as they are now. Those of earlier calls keep their numbers.

        Raises:
            ValueError: a tenant that still has workloads is missing.
        """
        named = {tenant.name: tenant for tenant in tenants}
        missing = sorted(name for name, number in self.numbers.items() if name not in named and self._has(number))
        if missing:
            raise ValueError(f"tenants {', '.join(missing)} still have workloads")
        for name in named:
            self.numbers.setdefault(name, len(self.numbers))
        gone = TenantState("", 7, {}, 0, 0.0)
        by_number = sorted(self.numbers, key=self.numbers.__getitem__)
        self.tenants = tuple(named.get(name, gone) for name in by_number)

    def _has(self, tenant: int) -> bool:
        return any((rows.columns["tenant"] == tenant).any() for rows in (self.pending, self.placed))

    def apply(
        self, pending: Iterable[QueueChange[QueuedWorkload]], placed: Iterable[QueueChange[PlacedWorkload]]
    ) -> None:
        """Takes over news of workloads; of several about one the last counts.

        Raises:
            ValueError: a workload names a tenant that was never set.
        """
        news = {(c.at_s, c.id): c.now for c in pending}
        self.pending.change(
            [key for key, now in news.items() if now is None],
            {
                key: (self._tenant(w), w.requested_level or 1, w.held, self.gangs.number(w.jobs))
                for key, w in news.items()
                if w is not None
            },
        )
        holders = {(c.at_s, c.id): c.now for c in placed}
        self.placed.change(
            [key for key, now in holders.items() if now is None],
            {
                key: (self._tenant(w), w.requested_level or 1, False, self.holdings.number(w.gpus, w.cpus_milli))
                for key, w in holders.items()
                if w is not None
            },
        )

    def _tenant(self, workload: QueuedWorkload | PlacedWorkload) -> int:
        number = self.numbers.get(workload.tenant)
        if number is None:
            raise ValueError(
                f"workload {workload.id!r} has tenant {workload.tenant!r}, which is none of the snapshot's tenants"
            )
        return number
