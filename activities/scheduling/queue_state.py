"""The columns of GMS in a scheduler process: tenants and their use, pending and placed workloads."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np

from activities.scheduling.decision_rows import EPOCH_US, AttemptRow, MachineRow, QueuedRow, UseRow
from activities.scheduling.scan_result import ArrayBacklog, ArrayWindow, WaitingElement, read_window
from activities.scheduling.usage import Amount, Usage
from domain.demand import demand_of
from domain.ids import array_of
from domain.scheduling import CreditWeights, PlacedWorkload, QueuedWorkload, TenantState, gpu_seconds
from gms.columns import QueueChange, QueueColumns
from gms.contested_use import ContestedTime, larger_share, share_of_quota, waiting_tenants
from gms.scan import Scan, scan_queue
from infra.config.scheduling import SchedulerSettings

Person = tuple[str, str]
"""Tenant, and the person who submitted."""
US = 1_000_000
"""Microseconds per second."""


def seconds(us: int) -> float:
    """Converts the time of a row to seconds since 1970."""
    return (us + EPOCH_US) / US


def microseconds(seconds: float) -> int:
    """Converts seconds since 1970 to the time of a row."""
    return round(seconds * US) - EPOCH_US


class QueueState:
    """The columns of GMS: tenants and their use, pending and placed workloads."""

    def __init__(self, settings: SchedulerSettings, contested: ContestedTime | None = None) -> None:
        """`contested`: that of an earlier state of this process; None: all use before now counts as contested."""
        self.queue = QueueColumns()
        self._settings = settings
        self._tenants: dict[str, TenantState] = {}
        self._contested = contested if contested is not None else ContestedTime()
        self._forget_use()
        self._ready: dict[str, Amount] = {}
        """The GPUs and CPUs of each ready machine."""
        self._fleet = (0, 0)
        self._heads: dict[str, tuple[QueuedRow, ArrayWindow]] = {}
        """By id, the arrays with elements that a scan may rank."""
        self._requeued: dict[str, dict[str, QueuedRow]] = {}
        """By array and id, the queued elements with a row."""
        self._ranked: dict[str, dict[str, QueuedWorkload]] = {}
        """By array and id, the elements in the columns."""
        self.elements: dict[str, WaitingElement] = {}
        """By id, the workloads in the columns that are elements of arrays without a row."""
        self.ranks: dict[bytes, int] = {}
        """The ranks of placed workloads in Postgres."""

    def scan(self, now_s: float) -> Scan:
        """Ranks all pending and placed workloads as of a time."""
        settings = self._settings
        now_us = microseconds(now_s)
        averages = self._usage.averages(now_us, self._tenants)
        # Only differences of contested time are used, so what it was before the window does not matter.
        self._contested.forget(now_us - round(settings.fair_window_s * US))
        of_people: dict[str, dict[str, float]] = defaultdict(dict)
        for (tenant, user), used in self._people.averages(now_us, self._seen_people).items():
            if (share := larger_share(used, self._fleet)) > 0:
                of_people[tenant][user] = share
        self.queue.set_tenants(
            replace(t, window_share=share_of_quota(t, averages[name], self._fleet), user_shares=of_people.get(name, {}))
            for name, t in self._tenants.items()
        )
        weights = CreditWeights(
            w_age=settings.w_age, age_cap_s=settings.age_cap_s, w_fair=settings.w_fair, w_user=settings.w_user,
            w_short=settings.w_short,
        )  # fmt: skip
        return scan_queue(self.queue, now_s, weights)

    def mark_contested(self, now_s: float) -> None:
        """Counts the use of tenants as contested, or not, from now on."""
        self._contested.mark(microseconds(now_s), waiting_tenants(self.queue, now_s))

    def other_ranks(self, scan: Scan) -> dict[str, int]:
        """Returns the placed workloads whose rank in a scan differs from Postgres, with the new rank."""
        found = zip(self.queue.placed.id.tolist(), scan.placed_rank.tolist(), strict=True)
        return {id_.decode(): rank for id_, rank in found if self.ranks.get(id_) != rank}

    def put_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Replaces the tenants. Deleted tenants stay until the next scan: changes of their workloads may follow."""
        self._tenants = {t.name: t for t in tenants}
        before = {t.name: t for t in self.queue.tenants if t.name}
        self.queue.set_tenants({**before, **self._tenants}.values())

    def put_workloads(self, rows: Iterable[QueuedRow], moved: Collection[str] = ()) -> None:
        """Updates workloads, queued or not. Those in `moved` may have a new start of their wait, or be deleted."""
        news: list[QueueChange[QueuedWorkload]] = []
        arrays = set[str]()
        for id_ in moved:
            for row in np.flatnonzero(self.queue.pending.id == id_.encode()):
                news.append(QueueChange(float(self.queue.pending.at_s[row]), id_, None))
            arrays |= self._forget(id_)
        for w in rows:
            if w.array is not None or w.window is not None or w.id in self._heads:
                arrays.add(self._put_of_array(w))
                continue
            now = None if w.ask is None else _queued(w, w.id)
            news.append(QueueChange(seconds(w.waits_from_us), w.id, now))
        for array in arrays:
            news += self._rank_elements(array)
        self.queue.apply(news, ())

    def _forget(self, moved: str) -> set[str]:
        """Forgets a workload that is an array, or an element that is not in the columns any more; returns arrays."""
        self._heads.pop(moved, None)
        array = array_of(moved)
        for known in (self._requeued, self._ranked):
            known.get(array, {}).pop(moved, None)
        return {moved, array} & (self._requeued.keys() | self._ranked.keys())

    def _put_of_array(self, w: QueuedRow) -> str:
        """Updates an array, or an element with a row; returns the array."""
        if w.array is not None:
            self._requeued.setdefault(w.array, {}).pop(w.id, None)
            if w.ask is not None:
                self._requeued[w.array][w.id] = w
            return w.array
        self._heads.pop(w.id, None)
        if w.window is not None:
            self._heads[w.id] = w, read_window(w.id, w.window)
        return w.id

    def _rank_elements(self, array: str) -> Iterator[QueueChange[QueuedWorkload]]:
        """Yields the changes of the columns after a change of an array or of its elements."""
        before, now = self._ranked.pop(array, {}), dict[str, QueuedWorkload]()
        for id_ in before:
            self.elements.pop(id_, None)
        window = ArrayWindow()
        if array in self._heads:
            head, window = self._heads[array]
            self.elements |= {element.id: element for element in window.waiting}
            now = {element.id: _queued(head, element.id, element.position) for element in window.waiting}
        for id_, w in self._requeued.get(array, {}).items():
            if id_ not in window.throttled:
                now[id_] = _queued(w, id_)
        if now:
            self._ranked[array] = now
        elif not self._requeued.get(array):
            self._requeued.pop(array, None)
        for id_, one in before.items() - now.items():
            yield QueueChange(one.submitted_at_s, id_, None)
        for id_, one in now.items() - before.items():
            yield QueueChange(one.submitted_at_s, id_, one)

    def backlogs(self) -> list[ArrayBacklog]:
        """Returns what waits of each array behind the elements that a scan ranks."""
        return [
            ArrayBacklog(id_, w.tenant, demand_of(w.ask or "{}").jobs, seconds(w.waits_from_us), more, window.free)
            for id_, (w, window) in self._heads.items()
            if (more := window.more + len(window.throttled)) and not w.held
        ]

    def put_attempts(self, gone: Iterable[AttemptRow], new: Iterable[AttemptRow]) -> None:
        """Removes the attempts `gone`, given in their old state, and adds the attempts `new`, both with their use."""
        news: list[QueueChange[PlacedWorkload]] = []
        for a in gone:
            self._ended(a, a.awarded_us)
            self.ranks.pop(a.workload.encode(), None)
            news.append(QueueChange(seconds(a.awarded_us), a.workload, None))
        for a in new:
            self._began(a)
            self.ranks[a.workload.encode()] = a.rank
            awarded_s = seconds(a.awarded_us)
            placed = PlacedWorkload(a.workload, a.tenant, awarded_s, a.quota_gpus, a.quota_cpus_milli, a.level)
            news.append(QueueChange(awarded_s, a.workload, placed))
        self.queue.apply((), news)

    def add_use(self, attempt: AttemptRow | UseRow, released_us: int) -> None:
        """Adds the use of a released attempt."""
        self._began(attempt)
        self._ended(attempt, released_us)

    def _began(self, a: AttemptRow | UseRow) -> None:
        self._seen_people.add((a.tenant, a.user))
        self._usage.began(a.tenant, a.awarded_us, held_by(a))
        self._people.began((a.tenant, a.user), a.awarded_us, held_by(a))

    def _ended(self, a: AttemptRow | UseRow, at_us: int) -> None:
        self._usage.ended(a.tenant, at_us, held_by(a))
        self._people.ended((a.tenant, a.user), at_us, held_by(a))

    def forget_use(self, live: Iterable[AttemptRow]) -> None:
        """Resets the use to that of the `live` attempts. The caller then adds the use of released attempts again."""
        self._forget_use()
        for a in live:
            self._began(a)

    def _forget_use(self) -> None:
        window_us = round(self._settings.fair_window_s * US)
        self._usage = Usage(window_us, self._contested.at)
        self._people = Usage[Person](window_us, lambda _, t_us: t_us)
        self._seen_people: set[Person] = set()

    def put_machine(self, machine: str, row: MachineRow | None) -> None:
        """Updates a machine's contribution to the fleet, the total to which tenants' use is compared; None: deleted."""
        before = self._ready.pop(machine, (0, 0))
        now = (row.gpus, row.cpus_milli) if row is not None and row.ready else (0, 0)
        if any(now):
            self._ready[machine] = now
        self._fleet = self._fleet[0] + now[0] - before[0], self._fleet[1] + now[1] - before[1]


def _queued(w: QueuedRow, id_: str, position: int = 0) -> QueuedWorkload:
    """Returns a queued workload, or the element at a position of an array, as decisions see it."""
    at_s, demand = seconds(w.waits_from_us + position), demand_of(w.ask or "{}")
    gpu_s = gpu_seconds(demand.jobs, demand.max_runtime_s)
    return QueuedWorkload(id_, w.tenant, at_s, demand.jobs, w.level, w.held, w.user, gpu_s)


def held_by(a: AttemptRow | UseRow) -> Amount:
    """Returns the amounts that an attempt holds: GPUs and thousandths of a core."""
    return sum(int(n) for n in a.gpu_types.values()), a.cpus_milli
