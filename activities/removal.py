"""Deleting replicas whose time is over: their objects first, their rows after, and never under a reader."""

import logging
import time
from itertools import islice

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from domain import ids
from domain.protocol import Activity
from infra.db import events, outbox
from infra.db.models import Attempt, Partition, Region, Replica, ReplicaPartition, Workload
from infra.db.nights import Night, NightMove
from infra.db.session import in_thread, transaction
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

    @activity.defn(name=Activity.REMOVE_REPLICAS.value)
    async def remove(self) -> float:
        """Deletes replicas that are being deleted and whose time is over, but for those that somebody reads.

        One that is still being copied is no more after this round. What cannot be deleted now is left for the next.
        """
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
            activity.heartbeat(table, region)
            last = batch[-1]
        await in_thread(self._forget, table, region)

    def _may_go(self, table: str, region: str) -> tuple[ObjectStore, frozenset[str]] | None:
        """The bucket, and the folders of the partitions that the replica has or was to have; None: it stays for now."""
        with transaction(self._engine) as session:
            row = _unused(session, table, region)
            if row is None:
                return None
            statement = select(Partition.location).where(Partition.data_table == table)
            if not row.whole:
                own = ReplicaPartition.data_table == table, ReplicaPartition.region == region
                statement = statement.where(Partition.name.in_(select(ReplicaPartition.partition).where(*own)))
            return open_store(session.get_one(Region, region).bucket_url), frozenset(session.scalars(statement))

    def _forget(self, table: str, region: str) -> None:
        with transaction(self._engine) as session:
            row = _unused(session, table, region)
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


def _objects(store: ObjectStore, prefix: str, after: str) -> list[str]:
    return [info.key for info in islice(store.list(prefix, after=after), _AT_ONCE)]


def _folder(table: str, key: str) -> str:
    """The folder of the partition to which an object would belong, by its name."""
    return ids.partition_prefix(table, key.removeprefix(ids.table_prefix(table)).partition("/")[0])


def _delete(store: ObjectStore, keys: list[str]) -> None:
    with Workers(_WORKERS) as workers:
        for done in [workers.submit(store.delete, key) for key in keys]:
            done.result()
