"""Agents for tests: the test decides what the tasks report and how they end."""

import asyncio
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from domain.ids import agent_queue
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeHeartbeat, NodeOutcome, NodePrepared, PrepareNode, RunNode, StopNode, TaskExit
from domain.task_reports import BandwidthReport, TaskProgress


class OpenEndedAgent:
    """The agent of one machine. It leaves each run open in Temporal; the test sends its heartbeats and completes it."""

    def __init__(self, client: Client, machine: str) -> None:
        self.machine = machine
        self._client = client
        self._tokens: dict[tuple[str, int], bytes] = {}
        self._started: dict[tuple[str, int], asyncio.Event] = {}
        self.stopped: list[tuple[str, int]] = []
        self.fails = False
        """Whether each try of a run fails with an error that is retried."""

    def worker(self) -> Worker:
        """Returns a worker that polls the machine's queue."""
        return Worker(
            self._client, task_queue=agent_queue(self.machine), activities=[self.prepare, self.run, self.stop],
            identity="agent", build_id="agent",
        )  # fmt: skip

    @activity.defn(name=Activity.PREPARE_NODE.value)
    async def prepare(self, request: PrepareNode) -> NodePrepared:
        return NodePrepared(self.machine, "127.0.0.1", dict.fromkeys(request.leads_jobs, 21000))

    @activity.defn(name=Activity.RUN_NODE.value)
    async def run(self, request: RunNode) -> NodeOutcome:
        key = (request.workload_id, request.attempt)
        self._tokens[key] = activity.info().task_token
        self._started.setdefault(key, asyncio.Event()).set()
        if self.fails:
            raise ApplicationError("again")
        activity.raise_complete_async()

    @activity.defn(name=Activity.STOP_NODE.value)
    async def stop(self, request: StopNode) -> NodeOutcome:
        self.stopped.append((request.workload_id, request.attempt))
        return NodeOutcome(self.machine, [TaskExit("main", 0, signal=15)], [], stopped=True)

    async def runs(self, workload: str, attempt: int = 1) -> None:
        """Waits until the agent has received the run of an attempt."""
        started = self._started.setdefault((workload, attempt), asyncio.Event())
        await asyncio.wait_for(started.wait(), 30)

    async def beats(
        self,
        workload: str,
        attempt: int = 1,
        task: int = 0,
        bandwidth: BandwidthReport | None = None,
        **progress: Any,
    ) -> None:
        """Sends one heartbeat with the progress of a task, and what the agent has measured."""
        await self.says(
            workload, NodeHeartbeat([TaskProgress("main", task, **progress)], 1, bandwidth), attempt=attempt
        )

    async def says(self, workload: str, *details: Any, attempt: int = 1) -> None:
        """Sends one heartbeat with any details."""
        handle = self._client.get_async_activity_handle(task_token=self._tokens[workload, attempt])
        await handle.heartbeat(*details)

    async def ends(self, workload: str, attempt: int = 1, exit_code: int = 0, **progress: Any) -> None:
        """Completes a run with the exit code and the progress of its task."""
        handle = self._client.get_async_activity_handle(task_token=self._tokens[workload, attempt])
        exits = [TaskExit("main", 0, exit_code=exit_code)]
        await handle.complete(NodeOutcome(self.machine, exits, [TaskProgress("main", 0, **progress)]))
