"""The in-memory state of a scheduler process: columns of the queue and the regions, which follow the change log.

Decisions do not query tables. Before a decision, `SchedulerState.current` applies the changes since the last read, from
one snapshot of Postgres. So decisions equal those after a full read of that snapshot. A process does a full read when
it starts, and when the log no longer reaches back to its last read.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from sqlalchemy import Engine

from activities.scheduling.decision_rows import AttemptRow, HoldingRow, MachineRow, QueuedRow, SnapshotReader
from activities.scheduling.queue_state import QueueState, microseconds, seconds
from domain.scheduling import (
    Holding,
    Plan,
    RunningWorkload,
    TenantState,
)
from gms.auction.auction import Auction, Options
from gms.auction.candidate import Stats
from gms.contested_use import ContestedTime
from infra.config.scheduling import SchedulerSettings
from infra.db import changes
from infra.db.session import transaction
from rms.gang import Planner
from rms.machines import MachinePlace
from rms.region import RegionColumns

_READ_AT_ONCE = 20_000


class SchedulerState:
    """The state of one process. Only one thread at a time may use it, within `current`.

    `only` are the regions of the process, which then has no queue; None: the queue and all regions.
    """

    def __init__(self, engine: Engine, settings: SchedulerSettings, only: Collection[str] | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._options = Options(reserve_after_s=settings.reserve_after_s)
        self._only = None if only is None else frozenset(only)
        self._lock = threading.RLock()
        self._seen: changes.Position | None = None
        self._doubted: set[changes.ChangedRow] = set()
        self.now_s = 0.0
        """The database's clock at the last read."""
        self.full_reads = 0
        self._stats = Stats()
        """Counters of all auctions. A full read does not reset them."""
        self._auction: Auction | None = None
        """The auction of the newest pass. A full read replaces it, but the new one continues its reservations."""
        self._contested = ContestedTime()
        """When the use of each tenant was contested, as far as this process has seen. A full read does not reset it."""
        self._clear()

    def _clear(self) -> None:
        self.queue = QueueState(self._settings, self._contested)
        self.regions: dict[str, RegionColumns] = {}
        self._planners: dict[str, Planner] = {}
        self._pass: int | None = None
        """The number of the scan whose pass the auction belongs to."""
        self._stale: set[str] = set()
        """Regions that were updated and whose derived columns must be refreshed before use."""
        self._live: dict[str, AttemptRow] = {}
        self._running: dict[str, RunningWorkload] = {}
        self._region_of: dict[str, str] = {}
        """The region of each machine."""
        self._withheld: dict[str, int] = {}
        """The mask of the slots that its owner has taken back, of each machine that has some."""
        self._doubted.clear()

    @contextmanager
    def current(self) -> Iterator["SchedulerState"]:
        """Locks the state until the end of the block, and updates it to the current snapshot.

        If the block raises, its tentative changes may still be in the columns, and it is unknown which of them Postgres
        has committed. So the next call does a full read, which also drops the caches of the auction.
        """
        with self._lock:
            self.apply_changes()
            try:
                yield self
            except BaseException:
                self._seen = None
                raise

    def apply_changes(self) -> None:
        """Applies the changes since the last read; does a full read if the log is too short. The lock must be held."""
        while not self._try_to_apply_changes():
            changes.begin_epoch(self._engine)

    def _try_to_apply_changes(self) -> bool:
        seen, self._seen = self._seen, None  # If this fails, the next call does a full read.
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            here, self.now_s = changes.position(session)
            if here is None:
                return False
            news = None if seen is None else changes.between(session, seen, here, self._only)
            reader = SnapshotReader(session)
            if news is None or any(c.kind == "everything" for c in news):
                self._read_all(reader)
            else:
                self._apply(reader, news | self._doubted)
                self._doubted.clear()
        self._stale = set(self.regions)
        self._seen = here
        return True

    @property
    def live(self) -> list[AttemptRow]:
        """The attempts that are not released."""
        return list(self._live.values())

    def holdings(self, workload: str) -> tuple[Holding, ...]:
        """Returns what a workload holds on machines; nothing, if it is unknown."""
        found = self._running.get(workload)
        return () if found is None else found.holdings

    def planner(self, region: str) -> Planner:
        """Returns a region's planner, with its machines and workloads as of the last read of the database."""
        planner = self._planners[region]
        if region in self._stale:
            planner.region.refresh(self.now_s)
            self._stale.discard(region)
        return planner

    def auction(self, scan: int) -> Auction:
        """Returns the auction of the pass that began with this scan, as of the last read of the database."""
        known = self._auction
        if known is None or list(known.regions.values()) != [self.regions[name] for name in sorted(self.regions)]:
            known = self._auction = Auction(self.regions.values(), self._options, self._stats, before=known)
            self._pass = None
        if self._pass != scan:
            known.open(self.now_s)
            self._stale.clear()
            self._pass = scan
        for region in sorted(self._stale):
            self.planner(region)
        return known

    def newest_auction(self) -> Auction:
        """Returns the auction of the newest pass, with its reservations and with its columns as of the last read."""
        return self.auction(0 if self._pass is None else self._pass)

    def mark_stale(self, plan: Plan) -> None:
        """Marks a plan that was awarded in a region's columns but not in Postgres: what it changed is read again."""
        region = self.regions[plan.region]
        region.drop_running(plan.workload)
        for victim in plan.victims:
            region.promises.pop(victim, None)
        self._doubted |= {changes.ChangedRow("machine", m, None) for job in plan.jobs for m, _ in job.machines}
        placed = [self._live[w] for w in (plan.workload, *plan.victims) if w in self._live]
        self._doubted |= {changes.ChangedRow("attempt", a.workload, a.attempt) for a in placed}

    @contextmanager
    def ranks(self, ranks: Mapping[str, int]) -> Iterator[None]:
        """Sets the ranks of placed workloads until the end of the block."""
        before = [self._running[w] for w in ranks if w in self._running]
        try:
            for workload in before:
                self._put_running(replace(workload, rank=ranks[workload.id]))
            yield
        finally:
            for workload in before:
                self._put_running(workload)

    def _put_running(self, workload: RunningWorkload) -> None:
        self._running[workload.id] = workload
        region = self._live[workload.id].region
        self.regions[region].put_running(workload)
        self._stale.add(region)

    # ----------------------------------------------------------------------------------------------- reading everything

    def _read_all(self, reader: SnapshotReader) -> None:
        self._clear()
        self.full_reads += 1
        self._put_regions(reader.regions())
        if self._only is None:
            self._put_tenants(reader)
            batch: list[QueuedRow] = []
            for row in reader.queue():
                batch.append(row)
                if len(batch) == _READ_AT_ONCE:
                    self.queue.put_workloads(batch)
                    batch = []
            self.queue.put_workloads(batch)
        for machine in reader.fleet():
            self._put_machine(machine.id, machine)
        live = [a for a in reader.live_attempts() if self._concerns(a.region)]
        self._put_attempts([], live, reader.live_holdings())
        if self._only is None:
            self._read_history(reader)

    def _put_tenants(self, reader: SnapshotReader) -> None:
        self.queue.put_tenants(
            TenantState(t.name, t.level, {k: int(v) for k, v in t.quota_gpus.items()}, t.quota_cpus_milli, 0.0)
            for t in reader.tenants()
        )

    def _put_regions(self, names: Iterable[str]) -> None:
        wanted = [name for name in names if self._only is None or name in self._only]
        for name in self.regions.keys() - set(wanted):
            del self.regions[name], self._planners[name]
        for name in wanted:
            if name not in self.regions:
                self.regions[name] = RegionColumns(name)
                self._planners[name] = Planner(self.regions[name])

    def _read_history(self, reader: SnapshotReader) -> None:
        since_us = microseconds(self.now_s - self._settings.fair_window_s)
        for use in reader.use(since_us):
            self.queue.add_use(use, use.released_us)

    # --------------------------------------------------------------------------------------------------- following

    def _apply(self, reader: SnapshotReader, news: Collection[changes.ChangedRow]) -> None:
        keys: dict[str, set[str]] = defaultdict(set)
        attempts = set()
        for kind, key, attempt in news:
            keys[kind].add(key)
            if kind == "attempt" and attempt is not None:
                attempts.add((key, attempt))
        if "region" in keys:
            self._put_regions(reader.regions())
        if self._only is None:
            if "tenant" in keys:
                self._put_tenants(reader)
            workloads = keys["workload"] | keys["moved"]
            if workloads:
                self.queue.put_workloads(reader.workloads(workloads), keys["moved"])
                # The requested level of a placed workload is read from the workload's row.
                attempts |= {(w, self._live[w].attempt) for w in workloads & self._live.keys()}
        if keys["machine"]:
            found = {m.id: m for m in reader.machines(keys["machine"])}
            for id_ in sorted(keys["machine"]):
                if (row := found.get(id_)) is not None and row.withheld != self._withheld.get(id_, 0):
                    # Holdings are without the slots that the owner has taken back, so they have changed, too.
                    attempts |= {(w.id, w.attempt) for w in self._running_on(id_)}
                self._put_machine(id_, row)
        if attempts:
            self._apply_attempts(reader, attempts)
        if self._only is None and "history" in keys:
            self.queue.forget_use(self._live.values())
            self._read_history(reader)

    def _running_on(self, machine: str) -> Iterable[RunningWorkload]:
        region = self.regions.get(self._region_of.get(machine, ""))
        return () if region is None else region.running_on(machine)

    def _apply_attempts(self, reader: SnapshotReader, keys: set[tuple[str, int]]) -> None:
        found = [a for a in reader.attempts(keys) if self._concerns(a.region)]
        gone = [a for w, n in keys if (a := self._live.get(w)) is not None and a.attempt == n]
        for a in found:
            if a.released_us is not None and self._only is None:
                self.queue.add_use(a, a.released_us)
        live = [a for a in found if a.released_us is None]
        self._put_attempts(gone, live, reader.holdings([(a.workload, a.attempt) for a in live]) if live else ())

    def _put_attempts(
        self, gone: Iterable[AttemptRow], live: Iterable[AttemptRow], holdings: Iterable[HoldingRow]
    ) -> None:
        gone, live = list(gone), list(live)
        if self._only is None:
            self.queue.put_attempts(gone, live)
        held = by_workload(holdings)
        # A holder that stays keeps its promise to its evictor, and the limit of its protection.
        stay = {(a.workload, a.attempt, a.region) for a in live if a.workload in held}
        for a in gone:
            del self._live[a.workload]
            self._running.pop(a.workload, None)
            if a.region in self.regions and (a.workload, a.attempt, a.region) not in stay:
                self.regions[a.region].drop_running(a.workload)
        for a in live:
            self._live[a.workload] = a
            if a.workload in held and a.region in self.regions:
                self._put_running(as_running(a, held[a.workload], self._settings.min_runtime_s))

    def _concerns(self, region: str) -> bool:
        return self._only is None or region in self._only

    def _put_machine(self, id_: str, row: MachineRow | None) -> None:
        before = self._region_of.pop(id_, None)
        self._withheld.pop(id_, None)
        if before is not None and before in self.regions and (row is None or row.region != before or not row.open):
            self.regions[before].drop_machine(id_)
        if self._only is None:
            self.queue.put_machine(id_, row)
        if row is None or row.region not in self.regions:
            return
        self._region_of[id_] = row.region
        if row.open:
            self.regions[row.region].put_machine(row.state())
        else:
            self.regions[row.region].note_closed(MachinePlace(id_, row.cluster, row.rack, row.zone))
        if row.withheld:
            self._withheld[id_] = row.withheld


def by_workload(rows: Iterable[HoldingRow]) -> dict[str, list[Holding]]:
    """Returns the holdings of each workload."""
    out: dict[str, list[Holding]] = defaultdict(list)
    for h in rows:
        out[h.workload].append(Holding(h.machine, h.gpus, h.cpus_milli, h.memory_bytes))
    return out


def as_running(a: AttemptRow, held: Iterable[Holding], min_runtime_s: float) -> RunningWorkload:
    """Returns a live attempt, with what it holds, as decisions see it."""
    started_s = seconds(a.awarded_us if a.started_us is None else a.started_us)
    return RunningWorkload(
        id=a.workload,
        rank=a.rank,
        started_at_s=started_s,
        holdings=tuple(held),
        last_checkpoint_at_s=None if a.checkpoint_us is None else seconds(a.checkpoint_us),
        evictable=a.ready and not a.evicting,
        # A workload that goes on in another place has had its minimum runtime. One that waits for its victims has no
        # protection yet: a gang's reservation counts on its slots from when it holds them, as in the simulator.
        protected_until_s=started_s + (min_runtime_s if a.ready and not a.booked else 0.0),
        attempt=a.attempt,
        # An upper bound: the runtime of earlier attempts is not subtracted.
        ends_by_s=inf if a.max_runtime_s is None else started_s + a.max_runtime_s,
        lost_s=a.lost_s,
        group=a.group,
        tenant=a.tenant,
    )
