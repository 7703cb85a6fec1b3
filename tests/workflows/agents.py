"""Node agents for workflow tests: real Temporal workers on the agents' queues; the test decides what their tasks do."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from domain.blame import LaunchError
from domain.ids import agent_queue
from domain.protocol.activities import Activity
from domain.protocol.leases import ElementResult
from domain.protocol.machines import (
    Attend,
    NodeHeartbeat,
    NodeOutcome,
    NodePrepared,
    Pace,
    PrepareNode,
    ProveKey,
    RunNode,
    StopNode,
    TaskExit,
)
from domain.task_reports import DiskReport, NoticeReport, NotReadyReport, TaskProgress

R = TypeVar("R", PrepareNode, RunNode, StopNode, Attend, Pace, ProveKey)
_LOOK_S = 0.02


async def until(holds: Callable[[], Any], what: str, patience_s: float = 60.0) -> None:
    """Waits until `holds`; fails with `what` on timeout."""
    give_up_s = asyncio.get_running_loop().time() + patience_s
    while not holds():
        assert asyncio.get_running_loop().time() < give_up_s, f"it never came true: {what}"
        await asyncio.sleep(_LOOK_S)


class _Attempt:
    """One attempt's single task on this machine."""

    def __init__(self) -> None:
        self.started = False
        self.watched = False
        self.told = False
        self.outcome: NodeOutcome | None = None
        """The outcome if the task ended by itself."""
        self.progress: list[TaskProgress] = []


class ScriptedAgent:
    """The agent of one machine. By default its tasks run until they are stopped, and then end by SIGTERM."""

    def __init__(self, client: Client, machine: str, task: int = 0) -> None:
        self.machine = machine
        self.asked: list[tuple[Activity, Any]] = []
        """Every activity try that reached this agent, with its request."""
        self.errors: dict[Activity, list[ApplicationError | RuntimeError]] = defaultdict(list)
        """Errors for the next tries of an activity, one for each try, raised before the try has an effect."""
        self.refusals: dict[Activity, str] = {}
        """Non-retryable errors with which current and later tries of an activity end."""
        self.held: set[Activity] = set()
        """Activities that send heartbeats but make no progress."""
        self.silent: set[Activity] = set()
        """Activities that send neither heartbeats nor results."""
        self.elements: list[ElementResult] = []
        """What it knows of the elements of a runner that was stopped."""
        self.prepared: NodePrepared | None = None
        """What it answers to requests to prepare; None: the right answer."""
        self.gone = False
        self._client = client
        self._task = task
        self._attempts: dict[int, _Attempt] = defaultdict(_Attempt)
        self._newest = 0
        self._busy = 0
        self._worker: Worker | None = None
        self._running: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------------------------------------- control by tests

    def requests(self, kind: Activity) -> list[Any]:
        """Returns the requests of one kind, including retries."""
        return [request for asked, request in self.asked if asked is kind]

    def reports(self, *others: int, **progress: Any) -> None:
        """Sets the progress that the newest attempt's task has reported; the agent claims it for other tasks, too."""
        tasks = (self._task, *others)
        self._attempts[self._newest].progress = [TaskProgress("main", task, **progress) for task in tasks]

    def has_started(self, attempt: int) -> None:
        """Marks an attempt's task as started by a workflow that was lost before it recorded the start."""
        self._newest = attempt
        self._attempts[attempt].started = True

    def was_told_to_stop(self) -> None:
        """Marks the newest attempt's task as stopped by a workflow that was lost."""
        self._attempts[self._newest].told = True

    def ends(
        self,
        exit_code: int | None = 0,
        *,
        signal: int | None = None,
        memory: tuple[int, int] | None = None,
        stopped: bool = False,
        notice: NoticeReport | None = None,
        not_ready: NotReadyReport | None = None,
        disk: DiskReport | None = None,
        job: str = "main",
    ) -> None:
        """Ends the newest attempt's task by itself."""
        run = self._attempts[self._newest]
        task = TaskExit(job, self._task, exit_code, signal, not_ready=not_ready, disk=disk)
        if memory is not None:
            task.memory_limit_bytes, task.memory_peak_bytes = memory
        run.outcome = NodeOutcome(self.machine, [task], run.progress, stopped, notice)

    # ------------------------------------------------------------------------------------------------- start and stop

    async def comes(self) -> None:
        """Starts to poll the agent's queue."""
        self.gone = False
        self._worker = Worker(
            self._client,
            task_queue=agent_queue(self.machine),
            activities=[self.prepare, self.run, self.stop, self.attend, self.pace, self.prove_key],
            identity="agent",
            build_id="agent",
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(maximum=2),
            graceful_shutdown_timeout=timedelta(seconds=0),
        )
        self._running = asyncio.create_task(self._worker.run())

    async def goes(self) -> None:
        """Stops without results, heartbeats or polls, as if the machine were unplugged."""
        await self.close()

    async def loses_touch(self) -> None:
        """Drops all running activities without a result, then takes new tries, like an agent that was restarted."""
        self.gone = True
        await until(lambda: self._busy == 0, "the agent's activities fell silent")
        self.gone = False

    async def close(self) -> None:
        """Stops polling."""
        self.gone = True
        await until(lambda: self._busy == 0, "the agent's activities fell silent")
        if self._worker is not None and self._running is not None:
            stopping = asyncio.create_task(self._worker.shutdown())
            # A worker does not end by itself if one of its activities stops responding during shutdown.
            await asyncio.wait({self._running}, timeout=5.0)
            self._running.cancel()
            await asyncio.wait({stopping}, timeout=5.0)
        self._worker = self._running = None

    # ------------------------------------------------------------------------------------------------------- activities

    @activity.defn(name=Activity.PREPARE_NODE.value)
    async def prepare(self, request: PrepareNode) -> NodePrepared:
        await self._begin(Activity.PREPARE_NODE, request)
        self._refuse_stopped(request.attempt)
        right = NodePrepared(self.machine, "10.0.0.1", dict.fromkeys(request.leads_jobs, 21000 + self._task))
        return self.prepared or right

    @activity.defn(name=Activity.RUN_NODE.value)
    async def run(self, request: RunNode) -> NodeOutcome:
        run = self._attempts[request.attempt]
        self._newest = request.attempt
        await self._begin(Activity.RUN_NODE, request)
        self._refuse_stopped(request.attempt)
        run.started = run.watched = True
        try:
            await self._beat_until(Activity.RUN_NODE, lambda: run.outcome is not None or run.told, run)
        finally:
            run.watched = False
        return run.outcome or self._told(run)

    @activity.defn(name=Activity.STOP_NODE.value)
    async def stop(self, request: StopNode) -> NodeOutcome:
        await self._begin(Activity.STOP_NODE, request)
        run = self._attempts[request.attempt]
        run.told = True
        # The stop completes after the run: unlike a real server, the test server cannot cancel a completing activity.
        await self._beat_until(Activity.STOP_NODE, lambda: not run.watched)
        await asyncio.sleep(_LOOK_S)
        return run.outcome or self._told(run)

    @activity.defn(name=Activity.ATTEND.value)
    async def attend(self, request: Attend) -> None:
        await self._begin(Activity.ATTEND, request)
        await self._beat_until(Activity.ATTEND, lambda: False)

    @activity.defn(name=Activity.PACE_NODE.value)
    async def pace(self, request: Pace) -> None:
        await self._begin(Activity.PACE_NODE, request)

    @activity.defn(name=Activity.PROVE_KEY.value)
    async def prove_key(self, request: ProveKey) -> str:
        await self._begin(Activity.PROVE_KEY, request)
        return f"proof of {request.challenge}"

    async def _begin(self, kind: Activity, request: R) -> None:
        self.asked.append((kind, request))
        if self.errors[kind]:
            raise self.errors[kind].pop(0)
        await self._beat_until(kind, lambda: kind not in self.held or kind in self.refusals)
        if kind in self.refusals:
            raise ApplicationError(self.refusals[kind], type="MachineFault", non_retryable=True)

    async def _beat_until(self, kind: Activity, done: Callable[[], bool], run: _Attempt | None = None) -> None:
        """Sends heartbeats until `done`. If the agent is gone or the activity is silent, it never completes."""
        self._busy += 1
        try:
            while True:
                if self.gone or kind in self.silent:
                    activity.raise_complete_async()
                if done():
                    return
                activity.heartbeat(NodeHeartbeat(run.progress if run else [], 1))
                await asyncio.sleep(_LOOK_S)
        finally:
            self._busy -= 1

    def _refuse_stopped(self, attempt: int) -> None:
        if self._attempts[attempt].told:
            raise ApplicationError("it was stopped here", type=LaunchError.STOPPED_ATTEMPT, non_retryable=True)

    def _told(self, run: _Attempt) -> NodeOutcome:
        exits = [TaskExit("main", self._task, signal=15)] if run.started else []
        return NodeOutcome(self.machine, exits, run.progress, stopped=True, elements=self.elements)
