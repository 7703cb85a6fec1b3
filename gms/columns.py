"""The queue as columns with one row per workload, updated from the change log.

Pending workloads are sorted by (submission time, id), placed workloads by (award time, id). Within a tenant, an earlier
submission gives a higher credit, so neither a scan nor an update has to sort a tenant's workloads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from domain.scheduling import PlacedWorkload, QueuedWorkload, QueueSnapshot, TenantState
from gms.demand import Gangs, Holdings

Array = npt.NDArray[Any]
Key = tuple[float, str]
W = TypeVar("W", PlacedWorkload, QueuedWorkload)
_FIELDS = {
    "tenant": np.int32, "requested_level": np.int8, "held": np.bool_, "wants": np.int32, "user": np.int32,
    "size": np.int8,
}  # fmt: skip
UNKNOWN_SIZE = 63
"""The size class of a workload whose GPU seconds are not known."""


class Rows:
    """Workloads sorted by (time, id).

    The column `wants` has the gang number of a pending workload and the holding number of a placed one.
    """

    def __init__(self) -> None:
        self.at_s: npt.NDArray[np.float64] = np.empty(0)
        self.id: Array = np.empty(0, "S1")
        """Workload ids in UTF-8, which sorts in the same order as the strings."""
        self.columns: dict[str, Array] = {name: np.empty(0, kind) for name, kind in _FIELDS.items()}

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def nbytes(self) -> int:
        """Size of all columns in bytes."""
        return self.at_s.nbytes + self.id.nbytes + sum(column.nbytes for column in self.columns.values())

    def name(self, row: int) -> str:
        """Returns the id of the workload in a row."""
        return str(bytes(self.id[row]).decode())

    def find(self, at_s: npt.NDArray[np.float64], ids: Array) -> tuple[Array, Array]:
        """Returns the row or insertion point of each key, and whether the key is present."""
        first, after = np.searchsorted(self.at_s, at_s, "left"), np.searchsorted(self.at_s, at_s, "right")
        place = first.copy()
        for k in np.flatnonzero(after > first):  # Equal times are rare, or all keys have the same time.
            place[k] += np.searchsorted(self.id[first[k] : after[k]], ids[k], "left")
        inside = place < after
        there = np.zeros(len(place), np.bool_)
        there[inside] = self.id[place[inside]] == ids[inside]
        return place, there

    def change(self, gone: Iterable[Key], new: Mapping[Key, tuple[int, int, bool, int, int, int]]) -> None:
        """Deletes the rows of the keys in `gone`, and inserts or replaces those in `new`.

        The values of a row are (tenant, requested_level, held, wants, user, size), in column order.
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
        before = np.concatenate(([0], np.cumsum(keep)))  # Number of kept rows before each row.
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


def size_class(gpu_s: float) -> int:
    """Returns the exponent of GPU seconds rounded up to a power of two, at least 1; `UNKNOWN_SIZE` for infinity."""
    return UNKNOWN_SIZE if gpu_s == inf else min(ceil(log2(max(gpu_s, 1.0))), UNKNOWN_SIZE - 1)


@dataclass(frozen=True)
class QueueChange(Generic[W]):
    """A change of one workload in the pending or in the placed rows."""

    at_s: float
    """Submission time in the pending rows, award time in the placed rows."""
    id: str
    now: W | None
    """The new state; None deletes the row."""


class QueueColumns:
    """Tenants, pending workloads and placed workloads. `apply` updates them; `gms.scan.scan_queue` scans them."""

    def __init__(self) -> None:
        self.tenants: tuple[TenantState, ...] = ()
        self.numbers: dict[str, int] = {}
        """Maps tenant names to tenant numbers."""
        self.users: dict[tuple[int, str], int] = {}
        """Maps people of tenants (by tenant number) to user numbers."""
        self.gangs = Gangs()
        self.holdings = Holdings(self.gangs)
        self.pending = Rows()
        self.placed = Rows()

    @classmethod
    def of(cls, snapshot: QueueSnapshot) -> "QueueColumns":
        """Builds the columns from a snapshot.

        Raises:
            ValueError: a workload names a tenant that is not in the snapshot.
        """
        queue = cls()
        queue.set_tenants(snapshot.tenants)
        queue.apply(
            [QueueChange(w.submitted_at_s, w.id, w) for w in snapshot.pending],
            [QueueChange(w.awarded_at_s, w.id, w) for w in snapshot.placed],
        )
        return queue

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Replaces the tenants. A tenant of an earlier call keeps its number.

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
        """Applies changes of workloads. If several changes concern one workload, the last one wins.

        Raises:
            ValueError: a workload names a tenant that `set_tenants` never received.
        """
        news = {(c.at_s, c.id): c.now for c in pending}
        self.pending.change(
            [key for key, now in news.items() if now is None],
            {
                key: (self._tenant(w), w.requested_level or 1, w.held, *self._numbers(w))
                for key, w in news.items()
                if w is not None
            },
        )
        holders = {(c.at_s, c.id): c.now for c in placed}
        self.placed.change(
            [key for key, now in holders.items() if now is None],
            {
                key: (self._tenant(w), w.requested_level or 1, False, self.holdings.number(w.gpus, w.cpus_milli), 0, 0)
                for key, w in holders.items()
                if w is not None
            },
        )

    def _numbers(self, workload: QueuedWorkload) -> tuple[int, int, int]:
        """Returns the values of a pending workload in the columns `wants`, `user` and `size`."""
        user = self.users.setdefault((self._tenant(workload), workload.user), len(self.users))
        return self.gangs.number(workload.jobs), user, size_class(workload.gpu_s)

    def _tenant(self, workload: QueuedWorkload | PlacedWorkload) -> int:
        number = self.numbers.get(workload.tenant)
        if number is None:
            raise ValueError(
                f"workload {workload.id!r} has tenant {workload.tenant!r}, which is not one of the known tenants"
            )
        return number
