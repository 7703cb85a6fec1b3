"""Paths and steps that the tests of running gangs have in common."""

from tests.workflows.lab import Life

AGAIN = ("placing awarded", "provisioning starting_tasks", "running running")

RUNNING = ("pending", *AGAIN)

EVICTED = ("checkpointing evicted", "preempted evicted")


async def running(life: Life) -> None:
    """Awards the workload and waits until its tasks run."""
    await life.award()
    await life.runs()


async def ends_well(life: Life) -> None:
    """Ends all tasks with exit code 0; the workload must succeed."""
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"
