"""Copies between stores: the checkpoints of moved workloads, and replicas of tables."""

from sqlalchemy import Engine
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.data import checkpoint_stores
from activities.data.bandwidth_shares import share
from activities.data.committed_copies import copy_committed
from activities.data.replicas import ReplicaCompletion
from activities.heartbeat import heartbeating
from activities.lifecycle.staging import failures_shown
from domain import ids
from domain.protocol.activities import Activity
from domain.protocol.data import ON_DEMAND, ReplicateTable
from domain.protocol.workloads import CheckpointCopy
from infra.config.settings import Settings
from infra.copies import CopyStore, open_copy_store
from infra.db.models import Region
from infra.db.session import transaction
from mizzen.checkpoint.root_copy import fence


class CopyActivities:
    """The copy activities, which run near a region's bucket."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def _checkpoints(self, workload: str, region: str, url: str | None) -> CopyStore:
        """Opens the folder of a workload's checkpoints in a cluster's store, or in the region's bucket (None)."""
        if url is None:
            with transaction(self._engine) as session:
                row = session.get(Region, region)
            if row is None:
                raise ApplicationError(f"region {region} does not exist", type="UnknownRegion", non_retryable=True)
            url = row.bucket_url
        return open_copy_store(f"{url.rstrip('/')}/{ids.checkpoint_prefix(workload)}")

    @activity.defn(name=Activity.COPY_CHECKPOINT.value)
    def copy_checkpoint(self, request: CheckpointCopy) -> int:
        """Fences older attempts at the source, then copies the committed checkpoints, each with its record last.

        Returns the number of bytes copied. While this fails, the error is shown as the workload's reason.

        Raises:
            ApplicationError: the source or the target is the store of a cluster, and does not answer or was replaced.
            CheckpointError: a log cannot be read.
        """
        with failures_shown(self._engine, request):
            return self._copy_checkpoint(request)

    def _copy_checkpoint(self, request: CheckpointCopy) -> int:
        for url in (request.source_store, request.target_store):
            if url is not None:  # Staging has written the marker in the target, maybe on another host.
                checkpoint_stores.check(url, request.workload_id)
        source = self._checkpoints(request.workload_id, request.source_region, request.source_store)
        target = self._checkpoints(request.workload_id, request.target_region, request.target_store)
        fence(source, request.attempt, f"copy to {request.target_store or request.target_region}")
        own = share(self._settings.copies, request.source_region, request.target_region, ON_DEMAND)
        with heartbeating() as heartbeat:
            return copy_committed(source, target, share=own, progress=heartbeat)

    # No exception is thrown into the thread: `Completion` checks for a cancellation at the end of each part.
    @activity.defn(name=Activity.COPY_TABLE.value, no_thread_cancel_exception=True)
    def copy_table(self, request: ReplicateTable) -> int:
        """Copies and verifies what a replica of a table lacks, and makes it ready; returns its size in bytes.

        Returns 0 if the replica is gone or is being deleted. See `ReplicaCompletion.run` for the errors.
        """
        with heartbeating() as heartbeat:
            return ReplicaCompletion(self._engine, self._settings, request, heartbeat).run()
