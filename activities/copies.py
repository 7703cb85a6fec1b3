"""Bytes between regions: a moved workload's checkpoints, and replicas of tables."""

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, func, update
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.links import ON_DEMAND, share
from domain import ids
from domain.protocol import Activity, CheckpointCopy, ReplicateTable
from infra.config import Settings
from infra.db import events, outbox
from infra.db.models import Region, Replica, Table
from infra.db.session import transaction
from mizzen.checkpoint.copying import copy_committed, fence
from mizzen.objects.bandwidth import Share
from mizzen.objects.copying import copy_prefix
from mizzen.objects.store import ObjectStore, open_store

_SHOW_EVERY_S = 1.0
"""How often a table's copied bytes are written down for people to see."""


_Progress = Callable[[int, int], None]
_BEAT_S = 5.0


@contextmanager
def _beating() -> Iterator[_Progress]:
    """Heartbeats with the bytes last told, also while one object takes long: it may have many gigabytes."""
    told: tuple[int, ...] = ()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_S):
            activity.heartbeat(*told)

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal told
        told = (done_bytes, total_bytes)
        activity.heartbeat(*told)

    beater = threading.Thread(target=contextvars.copy_context().run, args=(beat,), daemon=True)
    beater.start()
    try:
        yield progress
    finally:
        done.set()
        beater.join()


class CopyActivities:
    """Effects near a region's bucket."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def _store(self, region: str, prefix: str = "") -> ObjectStore:
        with transaction(self._engine) as session:
            row = session.get(Region, region)
        if row is None:
            raise ApplicationError(f"no region {region}", type="UnknownRegion", non_retryable=True)
        return open_store(f"{row.bucket_url.rstrip('/')}/{prefix}" if prefix else row.bucket_url)

    def _share(self, request: CheckpointCopy | ReplicateTable) -> Share | None:
        return share(self._settings.copies, request.source_region, request.target_region, ON_DEMAND)

    @activity.defn(name=Activity.COPY_CHECKPOINT.value)
    def copy_checkpoint(self, request: CheckpointCopy) -> int:
        """Fences the source for older attempts, then copies the committed checkpoints, each record last."""
        prefix = ids.checkpoint_prefix(request.workload_id)
        source, target = (self._store(r, prefix) for r in (request.source_region, request.target_region))
        fence(source, request.attempt, f"copy to {request.target_region}")
        with _beating() as beat:
            return copy_committed(source, target, share=self._share(request), progress=beat)

    @activity.defn(name=Activity.COPY_TABLE.value)
    def copy_table(self, request: ReplicateTable) -> int:
        """Copies a table object by object, verifies it, and publishes the replica."""
        source, target = self._store(request.source_region), self._store(request.target_region)
        shown_at = -_SHOW_EVERY_S

        def show(done_bytes: int) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= _SHOW_EVERY_S:
                shown_at = time.monotonic()
                own = (Replica.data_table == request.table) & (Replica.region == request.target_region)
                with transaction(self._engine) as session:
                    session.execute(
                        update(Replica).where(own, Replica.state == "copying").values(done_bytes=done_bytes)
                    )

        with _beating() as beat:

            def progress(done_bytes: int, total_bytes: int) -> None:
                beat(done_bytes, total_bytes)
                show(done_bytes)

            prefix, name = ids.table_prefix(request.table), f"table {request.table}"
            copied = copy_prefix(source, target, prefix, name=name, share=self._share(request), progress=progress)
        with transaction(self._engine) as session:
            row = session.get(Replica, (request.table, request.target_region), with_for_update=True)
            table = session.get(Table, request.table)
            if row is None or table is None:
                raise ApplicationError(f"table {request.table} is gone", type="UnknownTable", non_retryable=True)
            if copied != table.size_bytes:
                message = f"table {request.table}: {copied} bytes copied, it has {table.size_bytes}"
                raise ApplicationError(message, type="IncompleteCopy")
            if row.state != "ready":
                row.state, row.done_bytes, row.ready_at = "ready", copied, func.now()
                events.record(
                    session,
                    "replica.ready",
                    region=request.target_region,
                    detail={
                        "table": request.table,
                        "source": request.source_region,
                        "bytes": copied,
                        "requested_by": row.requested_by,
                    },
                )
                outbox.wake_scheduler(session)
        return copied
