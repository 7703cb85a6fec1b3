"""The bare workflows of the benches end-to-end and backlog, and their worker: a process of its own, as mizzen's is."""

import asyncio
import sys
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from infra.config import TemporalSettings
from infra.temporal_client import connect

QUEUE = "bench-bare"


@activity.defn
async def nothing() -> None:
    """Does nothing."""


@workflow.defn
class Bare:
    """One activity."""

    @workflow.run
    async def run(self) -> None:
        """Has it done."""
        await workflow.execute_activity(nothing, start_to_close_timeout=timedelta(seconds=60))


@workflow.defn
class Signalled:
    """One signal."""

    def __init__(self) -> None:
        self._told = False

    @workflow.signal
    def end(self) -> None:
        """Ends it."""
        self._told = True

    @workflow.run
    async def run(self) -> None:
        """Waits for it."""
        await workflow.wait_condition(lambda: self._told)


async def work(address: str) -> None:
    """Works until it is stopped. Without the sandbox, which would cost it time."""
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
