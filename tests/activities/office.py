"""An installation with real workers of all roles, in which a test calls single activities as workflows do."""

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import temporalio.client
import temporalio.worker
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, UnsandboxedWorkflowRunner, Worker

from activities.roles import control_worker, region_worker
from capacity.provider import Provider
from domain.ids import CONTROL_QUEUE
from domain.protocol.activities import Activity
from tests.activities.world import World


@dataclass
class Call:
    """A call of an activity on a task queue."""

    activity: str
    queue: str
    arguments: list[Any]
    heartbeat_timeout_s: float


@workflow.defn(name="CallOnce")
class CallOnce:
    """Calls one activity, once, and returns its result."""

    @workflow.run
    async def run(self, call: Call) -> Any:
        return await workflow.execute_activity(
            call.activity,
            args=call.arguments,
            task_queue=call.queue,
            start_to_close_timeout=timedelta(minutes=1),
            heartbeat_timeout=timedelta(seconds=call.heartbeat_timeout_s),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


class Office(temporalio.client.Interceptor, temporalio.worker.Interceptor):
    """Calls activities, and notes which of them have returned in a worker."""

    def __init__(self, world: World, client: Client) -> None:
        self.world = world
        # Workers take over the interceptors of their client.
        self.client = Client(**{**client.config(), "interceptors": [self]})
        self.returned: set[Activity] = set()
        self._queue = f"calls-{uuid.uuid4().hex}"

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """Notes the activities that return."""
        return _Noting(next, self.returned)

    @contextlib.asynccontextmanager
    async def open(self, *regions: str, providers: Mapping[str, Provider] | None = None) -> AsyncIterator["Office"]:
        """Runs a worker of the role `control`, and one for each region."""
        world, state = self.world, self.world.scheduler_state
        async with contextlib.AsyncExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(8))
            workers = [
                control_worker(self.client, world.engine, world.settings, threads, state, (), providers or {}),
                *(region_worker(self.client, one, world.engine, world.settings, threads, state) for one in regions),
                Worker(
                    self.client,
                    task_queue=self._queue,
                    workflows=[CallOnce],
                    workflow_runner=UnsandboxedWorkflowRunner(),
                ),
            ]
            for worker in workers:
                await stack.enter_async_context(worker)
            yield self

    async def start(
        self, called: Activity, *arguments: Any, queue: str = CONTROL_QUEUE, heartbeat_timeout_s: float = 10.0
    ) -> WorkflowHandle[Any, Any]:
        """Starts a call of an activity."""
        call = Call(called.value, queue, list(arguments), heartbeat_timeout_s)
        return await self.client.start_workflow(
            CallOnce.run, call, id=f"call-{uuid.uuid4().hex}", task_queue=self._queue
        )

    async def call(self, called: Activity, *arguments: Any, queue: str = CONTROL_QUEUE) -> Any:
        """Calls an activity and returns its result, as JSON."""
        return await (await self.start(called, *arguments, queue=queue)).result()


class _Noting(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, returned: set[Activity]) -> None:
        super().__init__(next)
        self._returned = returned

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        result = await super().execute_activity(input)
        self._returned.add(Activity(activity.info().activity_type))
        return result
