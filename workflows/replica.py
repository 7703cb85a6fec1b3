"""Makes a complete, verified replica of a table in a region."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol.activities import Activity
    from domain.protocol.data import ReplicateTable
    from workflows.activity_calls import on_region

_COPY_S = 24 * 3600.0


@workflow.defn(name="ReplicaWorkflow")
class ReplicaWorkflow:
    """Copies one table to one region. After a cancellation, it ends when the copy activity has ended."""

    def __init__(self) -> None:
        self._asked = False

    @workflow.run
    async def run(self, request: ReplicateTable) -> int:
        """Copies, verifies and publishes the replica; returns its size in bytes."""
        while True:
            self._asked = False
            done_bytes = await on_region(
                Activity.COPY_TABLE,
                request,
                request.target_region,
                start_to_close_s=_COPY_S,
                cancellation=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            )
            if not self._asked:
                return done_bytes

    @workflow.signal
    def asked(self) -> None:
        """Signals a new request for the replica. Partitions that were appended meanwhile are copied, too."""
        self._asked = True
