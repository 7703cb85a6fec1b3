"""Housekeeping: reads progress, repairs what disagrees, and deletes what has been kept long enough."""

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from domain.protocol import Activity

_EXPIRE_EVERY = 30


@workflow.defn(name="HousekeepingWorkflow")
class HousekeepingWorkflow:
    """One for the installation."""

    @workflow.run
    async def run(self) -> None:
        """Rounds of collect and reconcile; every so many rounds, expire. The collect activity says how long to rest."""
        for round_ in range(500):
            rest_s = await self._do(Activity.COLLECT)
            await self._do(Activity.RECONCILE)
            if round_ % _EXPIRE_EVERY == _EXPIRE_EVERY - 1:
                await self._do(Activity.EXPIRE)
            await workflow.sleep(timedelta(seconds=rest_s or 10.0))
        workflow.continue_as_new()

    @staticmethod
    async def _do(activity: Activity) -> float | None:
        try:
            rest_s: float = await workflow.execute_activity(
                activity.value,
                result_type=float,
                start_to_close_timeout=timedelta(minutes=5),
                heartbeat_timeout=timedelta(seconds=60),
            )
            return rest_s
        except ActivityError:
            return None  # tried again in the next round
