"""The bare workflow of the bench end-to-end, and its worker: a process of its own, as mizzen's worker is one."""

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


async def work(address: str) -> None:
    """Works until it is stopped. Without the sandbox, which would cost it time."""
    client = await connect(TemporalSettings(address=address))
    worker = Worker(
        client,
        task_queue=QUEUE,
        workflows=[Bare],
        activities=[nothing],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=5000,
    )
    await worker.run()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
