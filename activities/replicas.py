"""A table's replica, completed from the catalogue: what it lacks, partition by partition, from the table's home."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import Engine, func, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError, CancelledError

from activities.links import share
from activities.partitions import Bucket, WrongPartition, bring
from domain.protocol import NIGHTLY, ReplicateTable
from infra.config import Settings
from infra.db import events, outbox
from infra.db.catalogue import held_bytes, lacking
from infra.db.models import Partition, Region, Replica, ReplicaPartition, Table
from infra.db.session import transaction
from mizzen.objects.store import open_store

_log = logging.getLogger(__name__)
_SHOW_EVERY_S = 1.0
"""How often copied bytes are written down for people to see, and whether the replica is still wanted is looked up."""
_AT_ONCE = 1000
"""Partitions that are looked up together."""
_SHOWN_AFTER = 3
"""Tries after which operators are told that a partition is not what the catalogue says."""
_WRONG_AGAIN = timedelta(hours=1)
"""Tried again so rarely from then on: somebody has to repair something first."""


class _Unwanted(Exception):
    """The replica is gone, or on its way out."""


class Completion:
    """One try to complete the replica that a request names. `beat` is told the bytes that it has, and is to have."""

    def __init__(
        self, engine: Engine, settings: Settings, request: ReplicateTable, beat: Callable[[int, int], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._request = request
        self._key = request.table, request.target_region
        self._beat = beat
        self._has_bytes = 0
        self._total_bytes = 0
        self._shown_at_s = -_SHOW_EVERY_S

    def run(self) -> int:
        """Copies, verifies and records each partition that the replica lacks, then makes it ready; its bytes.

        A table that is appended to meanwhile has one more partition to copy. 0: the replica is gone or is going.

        Raises:
            ApplicationError: a partition is not what the catalogue says.
            CancelledError: the activity was cancelled; the next try goes on behind the parts that are there.
        """
        try:
            while True:
                for partition in self._lacking():
                    self._complete(partition)
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
        # The home of this moment: it may move while the replica is being made.
        with transaction(self._engine) as session:
            self._wanted(session)
            home = session.get_one(Table, self._request.table).home_region
            source, target = (_bucket(session, region) for region in (home, self._request.target_region))
        if home == target.region:
            return
        own = share(self._settings.copies, home, target.region, self._request.share)
        try:
            bring(source, target, partition, share=own, progress=self._progress)
        except WrongPartition as error:
            raise self._wrong(partition, home, error) from error
        self._has_bytes += partition.size_bytes
        with transaction(self._engine) as session:
            row = self._wanted(session, lock=True)
            was_stale = row.stale_since is not None
            self._record(session, row, partition)
            row.source_region, row.done_bytes = home, self._has_bytes
            session.flush()
            session.refresh(row)
            if was_stale and row.stale_since is None:
                detail = {"table": row.data_table, "source": home, "bytes": row.done_bytes}
                events.record(session, "replica.fresh", region=row.region, detail=detail)
                outbox.wake_scheduler(session)

    def _progress(self, done_bytes: int, _: int) -> None:
        self._beat(self._has_bytes + done_bytes, self._total_bytes)
        if activity.is_cancelled():
            raise CancelledError(f"the copy of table {self._request.table} was cancelled")
        if time.monotonic() - self._shown_at_s < _SHOW_EVERY_S:
            return
        self._shown_at_s = time.monotonic()
        own = (Replica.data_table == self._request.table) & (Replica.region == self._request.target_region)
        with transaction(self._engine) as session:
            self._wanted(session)
            session.execute(update(Replica).where(own).values(done_bytes=self._has_bytes + done_bytes))

    @staticmethod
    def _record(session: Session, row: Replica, partition: Partition) -> None:
        """The replica has the partition, verified, if it is still to have it."""
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

    def _wrong(self, partition: Partition, home: str, error: WrongPartition) -> ApplicationError:
        tries = activity.info().attempt
        if tries < _SHOWN_AFTER:
            return ApplicationError(str(error), type="WrongPartition")
        nightly = self._request.share == NIGHTLY
        _log.warning("%s; %s", error, "given up for this night" if nightly else f"tried again in {_WRONG_AGAIN}")
        detail = {"table": partition.data_table, "partition": partition.name, "source": home, "error": str(error)}
        with transaction(self._engine) as session:
            events.record(session, "replica.failed", region=self._request.target_region, detail=detail)
        if nightly:
            return ApplicationError(str(error), type="WrongPartition", non_retryable=True)
        return ApplicationError(str(error), type="WrongPartition", next_retry_delay=_WRONG_AGAIN)

    def _publish(self) -> int | None:
        """Makes the replica ready if it lacks nothing, and says how many bytes it has; None: there is more to copy."""
        with transaction(self._engine) as session:
            # Appends to the table wait: what is ready has all that there is.
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


def _bucket(session: Session, region: str) -> Bucket:
    return Bucket(region, open_store(session.get_one(Region, region).bucket_url))
