"""The bare workflows of the suites end-to-end and backlog, and their worker, which is a separate process."""

import asyncio
import sys
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from infra.config.services import TemporalSettings
from infra.temporal_client import connect

QUEUE = "bench-bare"


@activity.defn
async def nothing() -> None:
    """Does nothing."""


@workflow.defn
class Bare:
    """A workflow that executes one activity."""

    @workflow.run
    async def run(self) -> None:
        """Executes the activity."""
        await workflow.execute_activity(nothing, start_to_close_timeout=timedelta(seconds=60))


@workflow.defn
class Signalled:
    """A workflow that waits for one signal."""

    def __init__(self) -> None:
        self._told = False

    @workflow.signal
    def end(self) -> None:
        """Ends the workflow."""
        self._told = True

    @workflow.run
    async def run(self) -> None:
        """Waits for the signal `end`."""
        await workflow.wait_condition(lambda: self._told)


async def work(address: str) -> None:
    """Runs the worker until it is stopped, without Temporal's sandbox, which would slow it down."""
    client = await connect(TemporalSettings(address=address))
    worker = Worker(
        client,
        task_queue=QUEUE,
        workflows=[Bare, Signalled],
        activities=[nothing],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=5000,
    )
    await worker.run()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
