"""The lifecycle of a service: a decision after each change of its replicas, and at intervals, until it has ended."""

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol.activities import Activity
    from domain.protocol.services import ServiceRef, ServiceStep
    from workflows.activity_calls import record

LONG_HISTORY_EVENTS = 2000
"""The workflow continues as new once its history has this many events."""


@workflow.defn(name="ServiceWorkflow")
class ServiceWorkflow:
    """The workflow of one service. All facts are in Postgres; a signal says that they changed."""

    def __init__(self) -> None:
        self._looks = 0

    @workflow.signal
    def refresh(self) -> None:
        """Signals that a replica of the service, or its specification, changed."""
        self._looks += 1

    @workflow.run
    async def run(self, ref: ServiceRef) -> None:
        """Decides again and again. Signals that arrive during a decision lead to one more."""
        while True:
            seen = self._looks
            step = await record(Activity.STEP_SERVICE, ref, ServiceStep)
            if step.ended:
                return
            info = workflow.info()
            if info.is_continue_as_new_suggested() or info.get_current_history_length() > LONG_HISTORY_EVENTS:
                workflow.continue_as_new(ref)
            await self._changed(seen, step.next_s)

    async def _changed(self, seen: int, timeout_s: float) -> None:
        try:
            await workflow.wait_condition(lambda: self._looks != seen, timeout=timedelta(seconds=timeout_s))
        except TimeoutError:
            return
