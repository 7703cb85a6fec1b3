"""Deletes replicas whose grace is over: first the objects, then the rows, and never while a workload reads them.

Two conditions must hold before any object is deleted. The home's copy of every partition of the replica has been read
in full and found right since the deletion began. No other replica of the table is known to be wrong.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from itertools import islice

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.data.verification import OutOfTime, Reading, Verifier
from activities.heartbeat import heartbeating
from activities.lifecycle.dispatch import start_scrub
from activities.rounds import HOUSEKEEPING_LATE_S, RoundLog
from domain import ids
from domain.protocol.activities import Activity
from infra.db import events, integrity, outbox
from infra.db.models import Attempt, Region, Workload
from infra.db.placement_runs import PlacementMove, PlacementRun
from infra.db.rounds import MOST_ERROR_CHARACTERS
from infra.db.session import in_thread, in_thread_of, transaction
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from mizzen.objects.store import ObjectStore
from mizzen.objects.urls import open_store
from mizzen.objects.workers import Workers

_log = logging.getLogger(__name__)
_AT_ONCE = 500
"""The number of objects that are deleted between two heartbeats."""
_WORKERS = 8
_MOST_S = 120.0
"""The time limit of a round. The next round continues."""
_HANGS_S = 120.0
"""If the deletion of a replica has not ended so long after the end of the round's time, its store hangs."""
_HANGING = 4
"""Deletions that can hang at the same time; each occupies a thread."""
_FAILS = "its deletion fails: "


class RemovalActivities:
    """The housekeeping activity that deletes replicas."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self._engine = engine
        self._client = client
        self._verifier = Verifier(engine)
        self._rounds = RoundLog(engine, "deletion of replicas", late_s=HOUSEKEEPING_LATE_S)
        # Threads of their own: a store that hangs must not take those of the other activities.
        self._threads = ThreadPoolExecutor(_HANGING, thread_name_prefix="deletion")
        self._hanging: dict[str, asyncio.Task[None]] = {}
        """Deletions that hang, by region. The region's other replicas are skipped until they end."""

    @activity.defn(name=Activity.REMOVE_REPLICAS.value)
    async def remove(self) -> float:
        """Deletes replicas in state `deleting` whose grace is over, and keeps each region's verification running.

        A replica stays while a workload reads it, and until the home's copy is verified. If a workflow still copies a
        replica, this round cancels that workflow, and a later round deletes the replica. A replica that cannot be
        deleted now is tried again in the next round.
        """
        with heartbeating() as beat:
            async with self._rounds.one_async() as failures:
                await self._round(beat, failures)
        return 0.0

    async def _round(self, beat: Callable[..., None], failures: list[str]) -> None:
        await self._keep_scrubbing()
        until_s = time.monotonic() + _MOST_S
        for table, region in await in_thread(self._due):
            beat(table, region)
            if await self._was_copied(table, region):
                continue
            try:
                await self._bounded(table, region, until_s, partial(beat, table, region))
            except Exception as error:  # Any error of the bucket's store. The other replicas are still processed.
                _log.warning("the replica of table %s in %s cannot be deleted now: %s", table, region, error)
                failures.append(f"table {table} in {region}: {error}")
                await in_thread(self._failed, table, region, error)
            if time.monotonic() > until_s:
                break

    async def _bounded(self, table: str, region: str, until_s: float, beat: Callable[[], None]) -> None:
        """Deletes a replica, as far as the time until `until_s` (monotonic) allows.

        Raises:
            TimeoutError: the deletion, or an earlier one in the region, hangs.
        """
        before = self._hanging.get(region)
        if before is not None and not before.done():
            raise TimeoutError(f"an earlier deletion in {region} has not ended yet: the bucket does not respond")
        task = asyncio.create_task(self._remove(table, region, Reading(until_s=until_s, beat=beat)))
        self._hanging[region] = task
        try:
            await asyncio.wait({task}, timeout=max(0.0, until_s - time.monotonic()) + _HANGS_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if not task.done():
            # Its thread cannot be stopped. When the store responds, the deletion ends, because its deadline has passed.
            task.add_done_callback(_note_end)
            raise TimeoutError(f"the bucket of {region} does not respond")
        del self._hanging[region]
        task.result()

    async def _keep_scrubbing(self) -> None:
        for region in await in_thread(self._regions):
            await start_scrub(self._client, region)

    def _regions(self) -> list[str]:
        """Returns the regions that have replicas of tables."""
        with transaction(self._engine) as session:
            return list(session.scalars(select(Replica.region).distinct().order_by(Replica.region)))

    def _due(self) -> list[tuple[str, str]]:
        with transaction(self._engine) as session:
            rows = session.execute(
                select(Replica.data_table, Replica.region)
                .where(Replica.state == "deleting", Replica.delete_at <= func.now())
                # Replicas whose last deletion failed come last: a slow store does not use up each round.
                .order_by(func.coalesce(Replica.kept_because, "").startswith(_FAILS))
                .order_by(Replica.delete_at, Replica.data_table, Replica.region)
            )
            return [(table, region) for table, region in rows]

    async def _was_copied(self, table: str, region: str) -> bool:
        """Returns whether a workflow still copies the replica, and cancels it, because it may still write objects."""
        handle = self._client.get_workflow_handle(ids.replica_workflow_id(table, region))
        try:
            if (await handle.describe()).status is not WorkflowExecutionStatus.RUNNING:
                return False
            await handle.cancel()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def _remove(self, table: str, region: str, reading: Reading) -> None:
        if not await in_thread_of(self._threads, self._read_home, table, region, reading):
            return
        found = await in_thread_of(self._threads, self._may_go, table, region)
        if found is None:
            return
        store, folders = found
        whole = ids.table_prefix(table) in folders
        last = ""
        while batch := await in_thread_of(self._threads, _objects, store, ids.table_prefix(table), last):
            if reading.is_over:
                if last:
                    await in_thread_of(self._threads, self._continues, table, region)
                return
            own = batch if whole else [key for key in batch if _folder(table, key) in folders]
            await in_thread_of(self._threads, _delete, store, own)
            reading.beat()
            last = batch[-1]
        await in_thread_of(self._threads, self._forget, table, region)

    def _read_home(self, table: str, region: str, reading: Reading) -> bool:
        """Verifies the home's copy of the replica's partitions that were not read since the deletion began.

        Records the results. Names and sizes are listed again in each round, because a deletion may take many rounds.
        Returns False if the reading must continue later, or if the replica is still needed.
        """
        with transaction(self._engine) as session:
            began_at = _begun(session, table, region)
            home = integrity.home_of(session, table)
        if began_at is None or home is None:
            return False
        try:
            while todo := self._unverified(table, home, region, began_at):
                for partition in todo:
                    # A partition that was found wrong before is checked again: it may have been repaired since.
                    if self._verifier.check(partition, home, reading) is not None:
                        break
                else:
                    continue
                break
            self._verifier.check_listings(table, home, region, reading)
        except OutOfTime:
            return False
        return True

    def _unverified(self, table: str, home: str, region: str, since: datetime) -> list[Partition]:
        with transaction(self._engine) as session:
            return integrity.unverified(session, table, home, since=since, of=region, limit=_AT_ONCE)

    def _may_go(self, table: str, region: str) -> tuple[ObjectStore, frozenset[str]] | None:
        """Returns the bucket and the folders of the replica's planned or copied partitions; None: the replica stays."""
        with transaction(self._engine) as session:
            row = _deletable(session, table, region)
            if row is None:
                return None
            statement = select(Partition.location).where(Partition.data_table == table)
            if not row.whole:
                own = ReplicaPartition.data_table == table, ReplicaPartition.region == region
                statement = statement.where(Partition.name.in_(select(ReplicaPartition.partition).where(*own)))
            return open_store(session.get_one(Region, region).bucket_url), frozenset(session.scalars(statement))

    def _failed(self, table: str, region: str, error: Exception) -> None:
        """Records at the replica that its deletion failed. The event is recorded once for a series of failures."""
        with transaction(self._engine) as session:
            row = session.get(Replica, (table, region), with_for_update=True)
            if row is None or row.state != "deleting":
                return
            because = _FAILS + (str(error) or type(error).__name__)[:MOST_ERROR_CHARACTERS]
            if row.kept_because is not None and row.kept_because.startswith(_FAILS):
                row.kept_because = because
            else:
                _keep(session, row, because)

    def _continues(self, table: str, region: str) -> None:
        """Removes the error of an earlier round, because this round has deleted objects."""
        with transaction(self._engine) as session:
            row = session.get(Replica, (table, region), with_for_update=True)
            if row is not None and row.kept_because is not None and row.kept_because.startswith(_FAILS):
                row.kept_because = None

    def _forget(self, table: str, region: str) -> None:
        with transaction(self._engine) as session:
            row = _deletable(session, table, region)
            if row is not None:
                session.delete(row)
                events.record(session, "replica.deleted", region=region, detail={"table": table})
                # A workload that needs the table in this region again waits for this deletion.
                outbox.wake_scheduler(session)


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("a deletion that hung has ended: %s", error)


def _unused(session: Session, table: str, region: str) -> Replica | None:
    """Returns the locked row of a replica whose grace is over, if no live attempt reads it and no placement run copies
    it.

    The row lock prevents that the replica is taken into use again before this transaction ends.
    """
    row = session.get(Replica, (table, region), with_for_update=True)
    now = session.execute(select(func.clock_timestamp())).scalar_one()
    if row is None or row.state != "deleting" or row.delete_at is None or row.delete_at > now:
        return None
    readers = (
        select(Attempt.workload)
        .join(Workload, Workload.id == Attempt.workload)
        .where(Attempt.released_at.is_(None), Attempt.region == region, Workload.spec["tables"].contains([table]))
        .limit(1)
    )
    copies = (
        select(PlacementMove.number)
        .join(PlacementRun, PlacementRun.id == PlacementMove.placement_run)
        .where(PlacementRun.state == "moving", PlacementMove.state == "copying")
        .where(PlacementMove.data_table == table, PlacementMove.target_region == region)
        .limit(1)
    )
    return row if session.scalar(readers) is None and session.scalar(copies) is None else None


def _begun(session: Session, table: str, region: str) -> datetime | None:
    """Returns when the deletion of a replica began, and begins it if necessary; None: the replica is still needed.

    A deletion that was interrupted begins again, because earlier checks of the home's copy are outdated.
    """
    row = _unused(session, table, region)
    if row is None:
        row = session.get(Replica, (table, region))
        if row is not None:
            row.removal_began_at = None
        return None
    if (name := integrity.without_checksums(session, table, region)) is not None:
        _keep(session, row, f"partition {name} has no checksums yet, so the home's copy cannot be verified")
        return None
    row.removal_began_at = row.removal_began_at or integrity.clock(session)
    return row.removal_began_at


def _deletable(session: Session, table: str, region: str) -> Replica | None:
    """Returns the row of a replica whose objects may be deleted now; otherwise records why not and returns None."""
    # The table is locked before the replica, as everywhere. The home cannot change until this transaction ends.
    home = session.get(Table, table, with_for_update=True)
    row = _unused(session, table, region)
    if row is None or home is None or row.removal_began_at is None:
        return None
    wrong = integrity.wrong_region(session, table)
    since = row.removal_began_at
    if home.home_region == region:
        because = "the region is the table's home"
    elif wrong is not None and wrong != region:
        because = f"the copy in {wrong} was found wrong and is not repaired yet"
    elif todo := integrity.unverified(session, table, home.home_region, since=since, of=region):
        because = f"partition {todo[0].name} has not been read at the home {home.home_region} since its grace ended"
    else:
        if row.kept_because is not None and not row.kept_because.startswith(_FAILS):
            row.kept_because = None
        return row
    _keep(session, row, because)
    if wrong is not None:
        row.removal_began_at = None
    return None


def _keep(session: Session, row: Replica, because: str) -> None:
    if row.kept_because != because:
        row.kept_because = because
        detail = {"table": row.data_table, "because": because}
        events.record(session, "replica.deletion_held", region=row.region, detail=detail)


def _objects(store: ObjectStore, prefix: str, after: str) -> list[str]:
    return [info.key for info in islice(store.list(prefix, after=after), _AT_ONCE)]


def _folder(table: str, key: str) -> str:
    """Returns the folder of the partition to which an object belongs by its key."""
    return ids.partition_prefix(table, key.removeprefix(ids.table_prefix(table)).partition("/")[0])


def _delete(store: ObjectStore, keys: list[str]) -> None:
    with Workers(_WORKERS) as workers:
        for done in [workers.submit(store.delete, key) for key in keys]:
            done.result()
