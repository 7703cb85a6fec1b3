"""The auction activities: a scan ranks the queue, regions bid, and plans are awarded in queue order (MAST 4.2, 4.3)."""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import inf

from sqlalchemy import Engine, delete, text
from sqlalchemy.orm import Session
from temporalio import activity

from activities.scheduling.award_batch import BatchAward
from activities.scheduling.bids import asked, region_bids
from activities.scheduling.dry_run import dry_run
from activities.scheduling.elastic_growth import grow
from activities.scheduling.rate_limits import TimeShare
from activities.scheduling.scan_result import ScannedQueue, batch, put_batch
from activities.scheduling.scheduler_state import SchedulerState
from activities.scheduling.silence import SilenceTracker
from activities.scheduling.start_forecasts import MOST_FORECAST, PublishedStarts
from activities.scheduling.wait_reasons import explain_batch
from activities.scheduling.whole_machines import consolidate
from domain.protocol.activities import Activity
from domain.protocol.scheduling import AwardRequest, AwardResult, DryRunRequest, DryRunResult, ScanTicket
from gms.auction.candidate import Stats
from infra.config.settings import Settings
from infra.db import outbox, published_queue
from infra.db.buckets import failing_buckets
from infra.db.logs import ScanBatch
from infra.db.session import transaction
from rms.consolidation import CONSIDER_S, MOST_WAITING

_LONGEST_REST_S = 1.0
"""The maximum pause between two passes that keeps passes within their share of the time."""
_SHORT_PASS_S = 0.05
"""The part of each pass that does not count towards its share of the time: short passes need no pause."""
_PUBLISHING_SHARE = 0.1
"""The maximum fraction of time spent on publishing the queue. A long queue is published less often."""
_LONGEST_UNPUBLISHED_S = 30.0
"""Upper bound of the pause after a publication that waited for the database."""


class AuctionActivities:
    """The GMS activities: scans, awards and dry runs."""

    def __init__(self, engine: Engine, settings: Settings, state: SchedulerState, here: Collection[str] = ()) -> None:
        """`here` are the regions whose RMS is this process. Their bids need no request."""
        self._engine = engine
        self._settings = settings.scheduler
        self._state = state
        self._here = frozenset(here)
        self._listening = SilenceTracker(engine, self._settings)
        self._scanned: ScannedQueue | None = None
        """The queue of the newest scan, if this process made the scan."""
        self._starts = PublishedStarts(engine, self._settings.reserve_after_s)
        self._publish_from_s = 0.0
        """The earliest time of the next publication, on the monotonic clock."""
        self._consolidate_from_s = 0.0
        """The earliest time of the next search for moves, on the monotonic clock."""
        self._share = TimeShare(self._settings.pass_share, _LONGEST_REST_S, _SHORT_PASS_S)
        self._counters: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------------ scans

    @activity.defn(name=Activity.SCAN.value)
    def scan(self, _: None = None) -> ScanTicket:
        """Runs one GMS scan over all pending workloads; returns the ticket of the pass."""
        self._share.begin()
        with self._share.spending(), self._timed("scan_us"):
            return self._scan()

    def _scan(self) -> ScanTicket:
        with transaction(self._engine) as session:
            number = int(session.execute(text("select nextval('scan_number')")).scalar_one())
        with self._state.current() as state:
            state.queue.mark_contested(state.now_s)
            scan = state.queue.scan(state.now_s)
            scanned = self._scanned = ScannedQueue(number, state.now_s, scan, dict(state.queue.elements))
            ranks = state.queue.other_ranks(scan)
            regions, now_s = state.regions.keys() - self._here, state.now_s
        self._counters["scans"] += 1
        with transaction(self._engine) as session:
            write_ranks(session, ranks)
            self._listening.read(session, number, now_s)
            session.execute(delete(ScanBatch).where(ScanBatch.scan < number))
            if len(scanned) and regions:
                put_batch(session, number, 0, scanned.batch(0, self._settings.batch))
        asking = self._listening.asking(regions, now_s)
        self._listening.publish()
        if not len(scanned):
            self._grow(scanned)
            self._publish(scanned)
        return ScanTicket(
            scan=number,
            regions=asking.waited_for,
            batch=self._settings.batch,
            bid_timeout_s=self._settings.bid_deadline_s,
            interval_s=self._settings.scan_interval_s,
            queued=len(scanned),
            probed=asking.probed,
            probe_timeout_s=self._settings.bid_timeout_s,
            silent=self._listening.silent,
            rest_s=self._listening.due_s(now_s),
        )

    def _publish(self, scanned: ScannedQueue) -> float | None:
        """Publishes the queue of a scan; if it is too early for that, returns the seconds until it is due."""
        began_s = time.monotonic()
        if began_s < self._publish_from_s:
            return self._publish_from_s - began_s
        published = scanned.published(self._starts.of(self._state, scanned.demands(MOST_FORECAST)))
        with transaction(self._engine) as session:
            published_queue.publish(session, published, self._counters)
        took_s = time.monotonic() - began_s
        self._publish_from_s = began_s + min(took_s / _PUBLISHING_SHARE, took_s + _LONGEST_UNPUBLISHED_S)
        return None

    # ----------------------------------------------------------------------------------------------------------- awards

    @activity.defn(name=Activity.AWARD.value)
    def award(self, request: AwardRequest) -> AwardResult:
        """Awards a batch in queue order. An error ends the pass: the next try requests a new scan.

        If an earlier workload of the batch was placed in a region, the region bids again, in this process and on the
        changed state. So the result equals that of placing one workload at a time. Bids for the regions of this
        process, and replacements of lost bids, are also made here.
        """
        with self._share.spending(), self._timed("award_us"):
            try:
                return self._award(request)
            except BaseException:
                # The pass has lost its reservations, and awards may be committed without their wake of the scheduler.
                self._scanned = None
                raise

    def _award(self, request: AwardRequest) -> AwardResult:
        scanned = self._scanned if self._scanned is not None and self._scanned.number == request.scan else None
        result = self._award_batch(scanned, request)
        self._listening.publish()
        if scanned is None:
            result.over = True
            with transaction(self._engine) as session:
                outbox.wake_scheduler(session)
        else:
            self._go_on(scanned, request, result)
        return result

    def _go_on(self, scanned: ScannedQueue, request: AwardRequest, result: AwardResult) -> None:
        """Writes the next batch for the regions to read or, after the last batch, publishes the queue."""
        following = request.first + self._settings.batch
        if following >= len(scanned):
            self._grow(scanned)
            due = [s for s in (result.rest_s, self._publish(scanned)) if s is not None]
            result.rest_s = min(due, default=None)
            return
        if self._state.regions.keys() <= self._here:
            return
        with transaction(self._engine) as session:
            put_batch(session, scanned.number, following, scanned.batch(following, self._settings.batch))

    def _award_batch(self, scanned: ScannedQueue | None, request: AwardRequest) -> AwardResult:
        """Awards a batch, and publishes why the other workloads wait."""
        with self._state.current() as state:
            # 1. Find the regions that take part, the workloads that are still queued, and the bids that were made.
            self._listening.miss(request.scan, request.unreachable, state.now_s)
            rest_s = self._listening.due_s(state.now_s)
            with transaction(self._engine) as session:
                left_out = failing_buckets(session, state.regions)
                left_out |= self._listening.reasons(request.unreachable, state.now_s)
                if scanned is not None:
                    queued = scanned.batch(request.first, self._settings.batch)
                else:
                    queued = batch(session, request.scan, request.first)
                todo = asked(session, queued)
                all_here = state.regions.keys() - left_out.keys() <= self._here
                bids = {} if all_here else region_bids(session, request.scan, request.first)
            # 2. Award the batch.
            done = BatchAward(self._engine, state, request.scan, todo, left_out, bids)
            done.run()
            self._count(*done.stats)
            # 3. Publish why workloads wait, and copy tables where only data is missing.
            explain_batch(self._engine, state, done.waiting, done.outcomes, done.conflicts, sorted(left_out))
            reserved = state.auction(request.scan).reserved_machines()
            if scanned is not None:
                scanned.unasked |= state.regions.keys() if done.gave_up else left_out.keys()
        if request.first == 0:
            self._consolidate(done, reserved)
        if done.gave_up:
            with transaction(self._engine) as session:
                outbox.wake_scheduler(session)
        due_s = [rest_s, self._until_retry_s(done, state.now_s)]
        rest_s = min((s for s in due_s if s is not None), default=None)
        result = AwardResult(awarded=done.awarded, waiting=len(done.waiting), rebids=done.rebids, rest_s=rest_s)
        self._counters.update(awarded=result.awarded, waiting=result.waiting, rebids=result.rebids, batches=1)
        return result

    def _grow(self, scanned: ScannedQueue) -> None:
        """Lets elastic workloads grow, at the end of a pass."""
        if self._settings.grow:
            with self._state.current() as state:
                self._counters["growths"] += grow(self._engine, state, scanned, self._settings.min_runtime_s)

    def _consolidate(self, done: BatchAward, reserved: Collection[str]) -> None:
        """Moves workloads for gangs at the head of the queue that this pass refused."""
        now_s = time.monotonic()
        if not self._settings.moves_per_h or now_s < self._consolidate_from_s or not done.waiting:
            return
        self._consolidate_from_s = now_s + CONSIDER_S
        # A workload whose award failed has room, so nothing need move for it.
        refused = [a.demand.jobs for a in done.waiting if a.queued.workload not in done.conflicts]
        self._counters["moves"] += consolidate(self._engine, self._settings, refused[:MOST_WAITING], reserved)

    def _until_retry_s(self, done: BatchAward, now_s: float) -> float | None:
        """Returns the seconds until time alone may change that a workload of a batch waits; None: only events can.

        Not less than the average pause between passes that changes start (`wakes_per_s`).
        """
        waiting = (done.outcomes[a.queued.workload] for a in done.waiting)
        retry_at_s = min((outcome.retry_at_s for outcome in waiting), default=inf)
        return None if retry_at_s == inf else max(retry_at_s - now_s, 1 / self._settings.wakes_per_s)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._counters[name] += round(1e6 * (time.monotonic() - began_s))

    def _count(self, before: Stats, now: Stats) -> None:
        for name in ("bids", "rounds", "negative_hits", "negative_misses"):
            self._counters[name] += getattr(now, name) - getattr(before, name)

    @activity.defn(name=Activity.DRY_RUN.value)
    def dry_run(self, request: DryRunRequest) -> DryRunResult:
        """Scans and bids with one more workload in the queue. Nothing is written."""
        with transaction(self._engine) as session:
            left_out = failing_buckets(session, self._state.regions)
        left_out |= self._listening.reasons(self._listening.silent, self._state.now_s)
        return dry_run(self._engine, self._state, request, left_out)


_WRITE_RANKS = text(
    "with live as (select a.workload, a.attempt, n.rank from attempt as a"
    " join unnest(cast(:ids as text[]), cast(:ranks as bigint[])) as n (id, rank) on n.id = a.workload"
    " where a.released_at is null order by a.workload for no key update of a skip locked)"
    " update attempt set rank = live.rank from live"
    " where attempt.workload = live.workload and attempt.attempt = live.attempt"
)


def write_ranks(session: Session, ranks: Mapping[str, int]) -> None:
    """Writes changed ranks of placed workloads. An attempt that is locked is skipped and updated after a later scan."""
    if ranks:
        session.execute(_WRITE_RANKS, {"ids": list(ranks), "ranks": list(ranks.values())})
