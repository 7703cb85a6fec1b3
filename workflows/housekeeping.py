"""Housekeeping: deletes what has been kept long enough."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from domain.protocol import Activity

ROUNDS = 500
"""After so many rounds the history is continued in a new one."""
REMOVES_REPLICAS = "removes-replicas"
"""Patch: rounds that expire what was kept long enough also delete replicas whose time is over."""
RECONCILES_APART = "reconciles-apart"
"""Patch: reconciling has a loop of its own (`activities.lifecycle.reconcile`), independent of Temporal's state."""
PROGRESS_APART = "progress-apart"
"""Patch: progress is read in a loop of its own (`activities.lifecycle.progress`); a round only deletes, and rests."""
REST_S = 300.0
_EXPIRE_EVERY = 30
"""Rounds of before."""
_TRIES = 3
"""What fails this often in a row is left for the next round: it must not keep the others from their turn."""


@workflow.defn(name="HousekeepingWorkflow")
class HousekeepingWorkflow:
    """One for the installation."""

    @workflow.run
    async def run(self) -> None:
        """Rounds of expire and remove. Expiring may say how long to rest before the next."""
        rest_s: float | None = None
        for round_ in range(ROUNDS):
            if workflow.patched(PROGRESS_APART):
                await workflow.sleep(timedelta(seconds=rest_s or REST_S))
                rest_s = await self._do(Activity.EXPIRE)
                await self._do(Activity.REMOVE_REPLICAS)
            else:
                await self._round_of_before(round_)
        workflow.continue_as_new()

    async def _round_of_before(self, round_: int) -> None:
        rest_s = await self._do(Activity.COLLECT)
        if not workflow.patched(RECONCILES_APART):
            await self._do(Activity.RECONCILE)
        if round_ % _EXPIRE_EVERY == _EXPIRE_EVERY - 1:
            await self._do(Activity.EXPIRE)
            if workflow.patched(REMOVES_REPLICAS):
                await self._do(Activity.REMOVE_REPLICAS)
        await workflow.sleep(timedelta(seconds=rest_s or 10.0))

    @staticmethod
    async def _do(activity: Activity) -> float | None:
        try:
            rest_s: float = await workflow.execute_activity(
                activity.value,
                result_type=float,
                start_to_close_timeout=timedelta(minutes=5),
                heartbeat_timeout=timedelta(seconds=60),
                retry_policy=RetryPolicy(maximum_attempts=_TRIES),
            )
            return rest_s
        except ActivityError:
            return None  # tried again in the next round
