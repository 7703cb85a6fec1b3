"""Deleting replicas whose time is over: their objects first, their rows after, and never under a reader.

Before any object goes, the home's copy of all that the replica has is read in full and found right, from the beginning
of the deletion on, and no other replica of the table is known to be wrong.
"""

import logging
import time
from datetime import datetime
from functools import partial
from itertools import islice

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.data.verification import OutOfTime, Reading, Verifier
from activities.lifecycle.dispatch import start_scrub
from domain import ids
from domain.protocol import Activity
from infra.db import events, integrity, outbox
from infra.db.models import Attempt, Region, Workload
from infra.db.nights import Night, NightMove
from infra.db.session import in_thread, transaction
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from mizzen.objects.store import ObjectStore, open_store
from mizzen.objects.workers import Workers

_log = logging.getLogger(__name__)
_AT_ONCE = 500
"""Objects that are deleted between two signs of life."""
_WORKERS = 8
_MOST_S = 120.0
"""A round takes no longer: what is left goes in the next one."""


class RemovalActivities:
    """Housekeeping's deletions of replicas."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self._engine = engine
        self._client = client
        self._verifier = Verifier(engine)

    @activity.defn(name=Activity.REMOVE_REPLICAS.value)
    async def remove(self) -> float:
        """Deletes replicas that are being deleted and whose time is over, but for those that somebody reads, and those
        without which the home alone would be left unverified. Keeps each region's verification running.

        One that is still being copied is no more after this round. What cannot be deleted now is left for the next.
        """
        await self._keep_scrubbing()
        until_s = time.monotonic() + _MOST_S
        for table, region in await in_thread(self._due):
            activity.heartbeat(table, region)
            if await self._was_copied(table, region):
                continue
            try:
                await self._remove(table, region, until_s)
            except Exception as error:  # the bucket's own kind; the others' turn comes all the same
                _log.warning("the replica of %s in %s cannot be deleted now: %s", table, region, error)
            if time.monotonic() > until_s:
                break
        return 0.0

    async def _keep_scrubbing(self) -> None:
        for region in await in_thread(self._regions):
            await start_scrub(self._client, region)

    def _regions(self) -> list[str]:
        """Those that have tables."""
        with transaction(self._engine) as session:
            return list(session.scalars(select(Replica.region).distinct().order_by(Replica.region)))

    def _due(self) -> list[tuple[str, str]]:
        with transaction(self._engine) as session:
            rows = session.execute(
                select(Replica.data_table, Replica.region)
                .where(Replica.state == "deleting", Replica.delete_at <= func.now())
                .order_by(Replica.delete_at, Replica.data_table, Replica.region)
            )
            return [(table, region) for table, region in rows]

    async def _was_copied(self, table: str, region: str) -> bool:
        """Whether a workflow still ran that copies it: it is told to end, since it may be putting objects there."""
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

    async def _remove(self, table: str, region: str, until_s: float) -> None:
        beat = partial(activity.heartbeat, table, region)
        if not await in_thread(self._read_home, table, region, Reading(until_s=until_s, beat=beat)):
            return
        found = await in_thread(self._may_go, table, region)
        if found is None:
            return
        store, folders = found
        whole = ids.table_prefix(table) in folders
        last = ""
        while batch := await in_thread(_objects, store, ids.table_prefix(table), last):
            if time.monotonic() > until_s:
                return
            own = batch if whole else [key for key in batch if _folder(table, key) in folders]
            await in_thread(_delete, store, own)
            beat()
            last = batch[-1]
        await in_thread(self._forget, table, region)

    def _read_home(self, table: str, region: str, reading: Reading) -> bool:
        """Reads what is left to be read of the home's copy of all that the replica has; what is found is recorded.

        Names and sizes are listed once more in each round: a deletion may take many. False: that has to go on later, or
        somebody needs the replica still.
        """
        with transaction(self._engine) as session:
            began_at = _begun(session, table, region)
            home = integrity.home_of(session, table)
        if began_at is None or home is None:
            return False
        try:
            while todo := self._unverified(table, home, region, began_at):
                for partition in todo:
                    # Also what was found wrong before: its repair may not have been noted yet.
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
        """The bucket, and the folders of the partitions that the replica has or was to have; None: it stays for now."""
        with transaction(self._engine) as session:
            row = _deletable(session, table, region)
            if row is None:
                return None
            statement = select(Partition.location).where(Partition.data_table == table)
            if not row.whole:
                own = ReplicaPartition.data_table == table, ReplicaPartition.region == region
                statement = statement.where(Partition.name.in_(select(ReplicaPartition.partition).where(*own)))
            return open_store(session.get_one(Region, region).bucket_url), frozenset(session.scalars(statement))

    def _forget(self, table: str, region: str) -> None:
        with transaction(self._engine) as session:
            row = _deletable(session, table, region)
            if row is not None:
                session.delete(row)
                events.record(session, "replica.deleted", region=region, detail={"table": table})
                # Who wants the table there again has waited for this.
                outbox.wake_scheduler(session)


def _unused(session: Session, table: str, region: str) -> Replica | None:
    """A replica whose time is over, that no live attempt reads and no night copies. Nobody can take it back any more.

    The lock waits for those who were about to.
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
        select(NightMove.number)
        .join(Night, Night.id == NightMove.night)
        .where(Night.state == "moving", NightMove.state == "copying")
        .where(NightMove.data_table == table, NightMove.target_region == region)
        .limit(1)
    )
    return row if session.scalar(readers) is None and session.scalar(copies) is None else None


def _begun(session: Session, table: str, region: str) -> datetime | None:
    """When the deletion of a replica began; it begins now, if it has not. None: somebody needs the replica still.

    One that was held up begins anew: what the home held then says little about now.
    """
    row = _unused(session, table, region)
    if row is None:
        row = session.get(Replica, (table, region))
        if row is not None:
            row.removal_began_at = None
        return None
    if (name := integrity.without_checksums(session, table, region)) is not None:
        _keep(session, row, f"partition {name} has no checksums yet, without which nothing is deleted")
        return None
    row.removal_began_at = row.removal_began_at or integrity.clock(session)
    return row.removal_began_at


def _deletable(session: Session, table: str, region: str) -> Replica | None:
    """A replica whose objects may go now, by all that is known; why not is written down."""
    # In the order of all who lock both: the home cannot change until this transaction ends.
    home = session.get(Table, table, with_for_update=True)
    row = _unused(session, table, region)
    if row is None or home is None or row.removal_began_at is None:
        return None
    wrong = integrity.wrong_region(session, table)
    since = row.removal_began_at
    if home.home_region == region:
        because = "it is the table's home"
    elif wrong is not None and wrong != region:
        because = f"the copy in {wrong} was found wrong and is not repaired yet"
    elif todo := integrity.unverified(session, table, home.home_region, since=since, of=region):
        because = f"partition {todo[0].name} has not been read at the home {home.home_region} since its grace ended"
    else:
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
    """The folder of the partition to which an object would belong, by its name."""
    return ids.partition_prefix(table, key.removeprefix(ids.table_prefix(table)).partition("/")[0])


def _delete(store: ObjectStore, keys: list[str]) -> None:
    with Workers(_WORKERS) as workers:
        for done in [workers.submit(store.delete, key) for key in keys]:
            done.result()
