"""Housekeeping: deletes data whose retention time has passed."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from domain.protocol import Activity

ROUNDS = 500
"""The workflow continues as new after this many rounds."""
REMOVES_REPLICAS = "removes-replicas"
"""Patch: a round that expires old data also deletes replicas whose grace is over."""
RECONCILES_APART = "reconciles-apart"
"""Patch: reconciling runs in a separate loop (`activities.lifecycle.reconcile`), independent of Temporal's state."""
PROGRESS_APART = "progress-apart"
"""Patch: progress is read in a separate loop (`activities.lifecycle.progress`). A round only deletes and sleeps."""
REST_S = 300.0
_EXPIRE_EVERY = 30
"""The number of rounds between two expirations in histories from before `PROGRESS_APART`."""
_TRIES = 3
"""The number of tries of an activity in one round. Then the next round tries it again, so others are not blocked."""


@workflow.defn(name="HousekeepingWorkflow")
class HousekeepingWorkflow:
    """The housekeeping loop. An installation runs one."""

    @workflow.run
    async def run(self) -> None:
        """Repeats expiring and removing. The result of expiring may set the pause before the next round."""
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
            return None  # The next round tries again.
