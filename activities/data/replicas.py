"""Completes a replica of a table: copies each partition that the replica lacks or that is wrong.

A partition is copied from the table's home or, if the home's copy is wrong, from another region. The home's copy is
repaired in the same way.
"""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Engine, func, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError, CancelledError

from activities.data.bandwidth_shares import share
from activities.data.partitions import WrongPartition, bring
from activities.data.verification import Reading, Verifier, bucket_of
from domain.protocol.data import NIGHTLY, ReplicateTable
from infra.config.settings import Settings
from infra.copies.errors import CopyFailed
from infra.db import events, integrity, outbox
from infra.db.catalogue import held_bytes, lacking
from infra.db.placement_runs import home_move_began
from infra.db.session import transaction
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from mizzen.objects.store import MissingObject

_log = logging.getLogger(__name__)
_SHOW_EVERY_S = 1.0
"""The interval at which the number of copied bytes is written, and at which the copy checks that it is still wanted."""
_AT_ONCE = 1000
"""The number of partitions in one query."""
_SHOWN_AFTER = 3
"""The number of tries after which an event and a log message report a wrong partition."""
_WRONG_AGAIN = timedelta(hours=1)
"""The retry interval from then on, because an operator must repair something first."""


class _Wrong(Exception):
    """No region has a correct copy of the partition. The message describes the last region tried, `source`."""

    def __init__(self, source: str, message: str) -> None:
        super().__init__(message)
        self.source = source


class _Unwanted(Exception):
    """The replica is gone or is being deleted."""


class ReplicaCompletion:
    """One try to complete the replica of a request. `beat` is called with the copied bytes and the total bytes."""

    def __init__(
        self, engine: Engine, settings: Settings, request: ReplicateTable, beat: Callable[[int, int], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._request = request
        self._key = request.table, request.target_region
        self._beat = beat
        self._verifier = Verifier(engine)
        self._reading = Reading(beat=self._stop_if_cancelled)
        self._has_bytes = 0
        self._total_bytes = 0
        self._shown_at_s = -_SHOW_EVERY_S

    def run(self) -> int:
        """Copies, verifies and records each missing or wrong partition, then makes the replica ready.

        A replica that is to become the home is verified in full after the move began. Partitions that are appended to
        the table meanwhile are copied, too. Returns the size in bytes, or 0 if the replica is gone or being deleted.

        Raises:
            ApplicationError: a partition differs from the catalogue.
            CancelledError: the activity was cancelled. The next try continues after the parts that are already copied.
        """
        try:
            while True:
                failed: list[ApplicationError] = []
                for partition in self._lacking():
                    try:
                        self._complete(partition)
                    except _Wrong as error:
                        failed.append(self._failure(partition, error))
                if failed:
                    raise failed[0]
                self._verify_new_home()
                if (done_bytes := self._publish()) is not None:
                    return done_bytes
        except _Unwanted:
            return 0

    def _lacking(self) -> list[Partition]:
        with transaction(self._engine) as session:
            self._wanted(session)
            table = session.get_one(Table, self._request.table)
            self._has_bytes, self._total_bytes = held_bytes(session, *self._key), table.size_bytes
            return lacking(session, *self._key, limit=_AT_ONCE)

    def _wanted(self, session: Session, *, lock: bool = False) -> Replica:
        row = session.get(Replica, self._key, with_for_update=lock)
        if row is None or row.state == "deleting":
            raise _Unwanted
        return row

    def _complete(self, partition: Partition) -> None:
        """Copies a partition from the first region with a correct copy.

        Raises:
            _Wrong: no region has a correct copy.
        """
        what = f"table {partition.data_table}, partition {partition.name}"
        target_region = self._request.target_region
        with transaction(self._engine) as session:
            self._wanted(session)
            # Read for each partition, because the home may move during the copy.
            regions = integrity.sources_of(session, partition.data_table, partition.name, target_region)
            target = bucket_of(session, target_region)
            held = session.get(ReplicaPartition, (partition.data_table, partition.name, target_region))
            new = held is None or held.ready_at is None
            began_at = integrity.clock(session)
        failure = _Wrong(target_region, f"{what}: no other region has a copy of it")
        for region, was_wrong in regions:
            # A copy that was found wrong may have been repaired since.
            if was_wrong and (found := self._verifier.check(partition, region, self._reading)) is not None:
                failure = _Wrong(region, found)
                continue
            source = self._verifier.bucket(region)
            own = share(self._settings.copies, region, target_region, self._request.share)
            try:
                manifest = self._verifier.manifest(partition, region, self._reading)
                bring(source, target, partition, manifest, new=new, share=own, progress=self._progress)
            except WrongPartition as error:
                failure = _Wrong(region, str(error))
            except (CopyFailed, MissingObject):
                # The source may be wrong: verify it, and use another source if it is.
                if (found := self._verifier.check(partition, region, self._reading)) is None:
                    raise
                failure = _Wrong(region, f"{what}: {found}")
            else:
                self._recorded(partition, region, began_at)
                return
        if new or self._verifier.check(partition, target_region, self._reading) is not None:
            raise failure

    def _recorded(self, partition: Partition, source: str, began_at: datetime) -> None:
        self._has_bytes += partition.size_bytes
        with transaction(self._engine) as session:
            row = self._wanted(session, lock=True)
            was_stale = row.stale_since is not None
            self._record(session, row, partition)
            row.source_region, row.done_bytes = source, self._has_bytes
            session.flush()
            integrity.found_right(session, row.data_table, partition.name, row.region, began_at)
            session.refresh(row)
            if was_stale and row.stale_since is None:
                detail = {"table": row.data_table, "source": source, "bytes": row.done_bytes}
                events.record(session, "replica.fresh", region=row.region, detail=detail)
                outbox.wake_scheduler(session)

    def _verify_new_home(self) -> None:
        """If a placement run moves the table's home here, reads the whole copy once after the move began."""
        while True:
            with transaction(self._engine) as session:
                self._wanted(session)
                begun_at = home_move_began(session, *self._key)
                if begun_at is None:
                    return
                todo = integrity.unverified(session, *self._key, since=begun_at, limit=_AT_ONCE)
            if not todo:
                return
            for partition in todo:
                if self._verifier.check(partition, self._request.target_region, self._reading) is not None:
                    self._complete_again(partition)

    def _complete_again(self, partition: Partition) -> None:
        try:
            self._complete(partition)
        except _Wrong as error:
            raise self._failure(partition, error) from error

    def _progress(self, done_bytes: int, _: int) -> None:
        self._beat(self._has_bytes + done_bytes, self._total_bytes)
        self._stop_if_cancelled()
        if time.monotonic() - self._shown_at_s < _SHOW_EVERY_S:
            return
        self._shown_at_s = time.monotonic()
        own = (Replica.data_table == self._request.table) & (Replica.region == self._request.target_region)
        with transaction(self._engine) as session:
            self._wanted(session)
            session.execute(update(Replica).where(own).values(done_bytes=self._has_bytes + done_bytes))

    @staticmethod
    def _stop_if_cancelled() -> None:
        if activity.is_cancelled():
            raise CancelledError("the copy was cancelled")

    @staticmethod
    def _record(session: Session, row: Replica, partition: Partition) -> None:
        """Records that the replica has the verified partition, if the partition still belongs to the replica."""
        key = {"data_table": row.data_table, "partition": partition.name, "region": row.region}
        if row.whole:
            now = {"ready_at": func.clock_timestamp()}
            statement = insert(ReplicaPartition).values(**key, **now)
            new = statement.on_conflict_do_update(
                index_elements=list(key), set_=now, where=ReplicaPartition.ready_at.is_(None)
            )
            session.execute(new)
        elif (held := session.get(ReplicaPartition, tuple(key.values()))) is not None and held.ready_at is None:
            held.ready_at = func.clock_timestamp()

    def _failure(self, partition: Partition, error: "_Wrong") -> ApplicationError:
        tries = activity.info().attempt
        if tries < _SHOWN_AFTER:
            return ApplicationError(str(error), type="WrongPartition")
        nightly = self._request.share == NIGHTLY
        _log.warning(
            "%s; %s", error, "given up for this placement run" if nightly else f"tried again in {_WRONG_AGAIN}"
        )
        detail = {"table": partition.data_table, "partition": partition.name, "source": error.source}
        with transaction(self._engine) as session:
            region, told = self._request.target_region, {**detail, "error": str(error)}
            events.record(session, "replica.failed", region=region, detail=told)
        if nightly:
            return ApplicationError(str(error), type="WrongPartition", non_retryable=True)
        return ApplicationError(str(error), type="WrongPartition", next_retry_delay=_WRONG_AGAIN)

    def _publish(self) -> int | None:
        """Makes the replica ready if it is complete, and returns its size in bytes; None: there is more to copy."""
        with transaction(self._engine) as session:
            # The lock blocks appends to the table, so a replica that becomes ready is complete.
            table = session.get(Table, self._request.table, with_for_update=True)
            row = self._wanted(session, lock=True)
            if table is None or lacking(session, *self._key, limit=1):
                return None
            row.done_bytes = held_bytes(session, *self._key)
            if row.state == "copying":
                row.state, row.ready_at = "ready", func.now()
                detail = {
                    "table": table.name,
                    "source": row.source_region,
                    "bytes": row.done_bytes,
                    "requested_by": row.requested_by,
                }
                events.record(session, "replica.ready", region=row.region, detail=detail)
                outbox.wake_scheduler(session)
            return row.done_bytes
