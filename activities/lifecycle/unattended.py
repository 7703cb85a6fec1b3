"""Finds rows that should have a running workflow and have none.

Either Temporal has lost its state, or their mail was set aside.
"""

from collections.abc import Callable, Hashable, Sequence

from temporalio.client import Client

from activities.lifecycle.suspects import Suspects
from infra.db.session import in_thread


class Unattended:
    """The live rows of one kind that have no workflow. Each row has a workflow of its own."""

    def __init__(
        self,
        client: Client,
        workflow_type: str,
        workflow_id: Callable[[str], str],
        live_ids: Callable[[], Sequence[str]],
        patience_s: float,
    ) -> None:
        """`live_ids` reads the ids of the live rows. A row counts once it has had no workflow for `patience_s`."""
        self._client = client
        self._running = f"WorkflowType = '{workflow_type}' AND ExecutionStatus = 'Running'"
        self._workflow_id = workflow_id
        self._live_ids = live_ids
        self._suspects = Suspects(patience_s)

    async def find(self) -> list[str]:
        """Returns the ids of the live rows that have had no workflow since an earlier call. It usually only counts."""
        live = await in_thread(self._live_ids)
        if not live or (await self._client.count_workflows(self._running)).count >= len(live):
            self._suspects.due({})
            return []
        running = {execution.id async for execution in self._client.list_workflows(self._running)}
        gone: dict[str, Hashable] = {one: None for one in live if self._workflow_id(one) not in running}
        due = self._suspects.due(gone)
        for one in due:
            self._suspects.clear(one)
        return due
