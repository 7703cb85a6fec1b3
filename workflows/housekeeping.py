"""Housekeeping: deletes data whose retention time has passed."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from domain.protocol.activities import Activity

ROUNDS = 500
"""The workflow continues as new after this many rounds."""
REST_S = 300.0
_TRIES = 3
"""Number of tries of an activity in one round. Then other activities run, and the next round tries it again."""


@workflow.defn(name="HousekeepingWorkflow")
class HousekeepingWorkflow:
    """The housekeeping loop. An installation runs one."""

    @workflow.run
    async def run(self) -> None:
        """Repeats expiring and removing. The result of expiring may set the pause before the next round."""
        rest_s: float | None = None
        for _ in range(ROUNDS):
            await workflow.sleep(timedelta(seconds=rest_s or REST_S))
            rest_s = await self._do(Activity.EXPIRE)
            await self._do(Activity.REMOVE_REPLICAS)
        workflow.continue_as_new()

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
