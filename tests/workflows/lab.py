"""A workload under test: a real workflow on a Temporal server, state in memory instead of Postgres, scripted agents.

Only the effects of activities are replaced. `Facts` has the same rules as the real ones: the same phase changes are
legal, and calls for an older attempt and repeated calls change nothing.
"""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from domain.ids import CONTROL_QUEUE, region_queue, workload_workflow_id
from domain.lifecycle.attempts import NEXT_PHASES
from domain.phases import PLACED_PHASES, TERMINAL_PHASES, Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from domain.protocol.workloads import (
    TASKS_MAY_RUN,
    CheckpointCopy,
    FlushedRequest,
    LaunchPlan,
    NodeLaunch,
    ReleaseRequest,
    StageRequest,
    TransitionRequest,
    WorkloadInput,
)
from domain.reasons import Reason, ReasonCode
from tests.workflows.agents import ScriptedAgent, until
from workflows.workload import WorkloadWorkflow

HOME, AWAY = "east", "west"
"""Region in which gangs are placed, and region of the checkpoint of gangs that move."""
_WORKFLOW_TASKS = {
    EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED,
}


@dataclass
class Facts:
    """State of one workload, and all requests of its workflow."""

    workload_id: str
    plan: LaunchPlan
    attempt: int = 0
    phase: Phase = Phase.PENDING
    path: list[str] = field(default_factory=lambda: ["pending"])
    """Each phase with its reason code, in order."""
    details: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """The detail of each of these reasons."""
    staged: list[StageRequest] = field(default_factory=list)
    is_ready: bool = False
    """The attempt holds all its slots."""
    is_released: bool = False
    """The attempt is released in Postgres: staging is refused."""
    staged_here: list[int] = field(default_factory=list)
    copies: list[CheckpointCopy] = field(default_factory=list)
    releases: list[ReleaseRequest] = field(default_factory=list)
    flushed: list[FlushedRequest] = field(default_factory=list)
    errors: dict[Activity, list[Exception]] = field(default_factory=lambda: defaultdict(list))
    """Errors for the next tries of an activity, one for each try."""
    held: set[Activity] = field(default_factory=set)
    """Activities that make no progress."""
    _done: set[tuple[int, str]] = field(default_factory=set)

    def change(self, phase: Phase, code: str, detail: dict[str, Any]) -> None:
        """Changes the phase as `activities.lifecycle.workloads.change_phase` does."""
        if (self.attempt, phase.value) in self._done:
            return
        if phase not in NEXT_PHASES[self.phase]:
            message = f"{phase.value} cannot follow {self.phase.value}"
            raise ApplicationError(message, type="IllegalTransition", non_retryable=True)
        self._done.add((self.attempt, phase.value))
        self.phase = phase
        self.path.append(f"{phase.value} {code}")
        self.details.append(detail)

    def award(self, *, ready: bool) -> None:
        """Starts a new attempt and places it, as the award's transaction does."""
        self.attempt += 1
        self.is_ready = ready
        self.change(Phase.PLACING, "awarded" if ready else "waiting_for_victims", {})

    def transition(self, request: TransitionRequest) -> bool:
        if request.attempt != self.attempt:
            return False
        if request.provisioning is not None:
            self.change(Phase.PROVISIONING, request.provisioning["code"], request.provisioning["detail"])
            self.staged_here.append(request.attempt)
        self.change(Phase(request.phase), request.reason["code"], request.reason["detail"])
        return True

    def release(self, request: ReleaseRequest) -> None:
        if request.attempt in [r.attempt for r in self.releases]:
            return
        after_asking = self.phase in (Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING)
        if request.unstarted and (after_asking or (self.is_ready and len(self.plan.nodes) == 1)):
            raise ApplicationError("the tasks of the attempt may run", type=TASKS_MAY_RUN, non_retryable=True)
        self.releases.append(request)
        self.change(Phase(request.next_phase), request.reason["code"], request.reason["detail"])

    def stage(self, request: StageRequest) -> LaunchPlan:
        self.staged.append(request)
        if not (request.may_run and self.plan.runs_once_staged):
            return self.plan
        running, before = Reason(ReasonCode.RUNNING).to_json(), self.plan.starting.to_json()
        self.transition(TransitionRequest(request.workload_id, request.attempt, Phase.RUNNING.value, running, before))
        return replace(self.plan, is_running=True)

    async def fail_or_wait(self, kind: Activity) -> None:
        """Raises the next error of an activity, or waits while the activity is held."""
        if self.errors[kind]:
            raise self.errors[kind].pop(0)
        while kind in self.held:
            if not activity.info().is_local:
                activity.heartbeat()
            await asyncio.sleep(0.02)


async def handled(handle: WorkflowHandle[Any, Any]) -> list[HistoryEvent]:
    """Waits until a workflow has processed everything that has happened so far; returns its history."""
    give_up_s = asyncio.get_running_loop().time() + 20.0
    while True:
        events = list((await handle.fetch_history()).events)
        # A new signal or activity result schedules another workflow task.
        last = max(e.event_id for e in events if e.event_type in _WORKFLOW_TASKS)
        if events[last - 1].event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED:
            return events
        assert asyncio.get_running_loop().time() < give_up_s, f"the workflow's last event is {events[-1]}"
        await asyncio.sleep(0.02)


def serving(
    client: Client,
    queue: str,
    workflows: Sequence[type],
    activities: Sequence[Callable[..., Any]],
    runner: WorkflowRunner | None = None,
) -> Worker:
    """Returns a worker whose identity does not depend on this machine."""
    return Worker(
        client,
        task_queue=queue,
        workflows=workflows,
        activities=activities,
        workflow_runner=runner or SandboxedWorkflowRunner(),
        identity="worker",
        build_id="worker",
        max_heartbeat_throttle_interval=timedelta(seconds=0.2),  # cancellations arrive in responses to heartbeats
    )


class Lab:
    """A control worker and a region worker on a server, for many workloads."""

    def __init__(self, client: Client, queue: str) -> None:
        self.client = client
        self.queue = queue
        self._facts: dict[str, Facts] = {}
        self._numbers = itertools.count(1)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, client: Client, runner: WorkflowRunner | None = None, queue: str = CONTROL_QUEUE
    ) -> AsyncIterator["Lab"]:
        """Runs the workers while the context is open."""
        lab = cls(client, queue)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(lab.control(runner))
            if queue == CONTROL_QUEUE:
                await stack.enter_async_context(serving(client, region_queue(HOME), [], [lab.copy_checkpoint]))
            yield lab

    def control(self, runner: WorkflowRunner | None = None) -> Worker:
        """Returns a control worker; it serves while it is used as a context."""
        effects = [self.transition, self.release, self.flushed, self.stage, self.staged_here]
        return serving(self.client, self.queue, [WorkloadWorkflow], effects, runner)

    def life(self, machines: int = 2, name: str | None = None) -> "Life":
        """Creates a new workload with this many machines, each with one task."""
        id_ = name or f"wl-{next(self._numbers)}"
        life = Life(self, id_, machines)
        self._facts[id_] = life.facts
        return life

    @activity.defn(name=Activity.TRANSITION.value)
    async def transition(self, request: TransitionRequest) -> bool:
        await self._facts[request.workload_id].fail_or_wait(Activity.TRANSITION)
        return self._facts[request.workload_id].transition(request)

    @activity.defn(name=Activity.RELEASE.value)
    async def release(self, request: ReleaseRequest) -> None:
        await self._facts[request.workload_id].fail_or_wait(Activity.RELEASE)
        self._facts[request.workload_id].release(request)

    @activity.defn(name=Activity.FLUSHED.value)
    async def flushed(self, request: FlushedRequest) -> None:
        await self._facts[request.workload_id].fail_or_wait(Activity.FLUSHED)
        self._facts[request.workload_id].flushed.append(request)

    @activity.defn(name=Activity.STAGE.value)
    async def stage(self, request: StageRequest) -> LaunchPlan:
        facts = self._facts[request.workload_id]
        await facts.fail_or_wait(Activity.STAGE)
        if facts.is_released and not request.winds_up:
            raise ApplicationError("the attempt is released", type="ReleasedAttempt", non_retryable=True)
        return facts.stage(request)

    @activity.defn(name=Activity.STAGED_HERE.value)
    async def staged_here(self, request: StageRequest) -> None:
        await self._facts[request.workload_id].fail_or_wait(Activity.STAGED_HERE)
        self._facts[request.workload_id].staged_here.append(request.attempt)

    @activity.defn(name=Activity.COPY_CHECKPOINT.value)
    async def copy_checkpoint(self, request: CheckpointCopy) -> int:
        facts = self._facts[request.workload_id]
        facts.copies.append(request)
        await facts.fail_or_wait(Activity.COPY_CHECKPOINT)
        return 1 << 20


def launch_plan(workload_id: str, nodes: list[NodeLaunch], region: str = HOME) -> LaunchPlan:
    """Returns a plan with one task for each machine, one retry, and short times."""
    return LaunchPlan(
        region=region,
        bucket_url="file:///bucket",
        launch_key=f"launches/{workload_id}.json",
        nodes=nodes,
        tasks=len(nodes),
        checkpoint_region=None,
        grace_s=5.0,
        max_runtime_s=None,
        retries=1,
        heartbeat_timeout_s=10.0,
        node_lost_after_s=10.0,
    )


class Life:
    """One workload with its agents; tests act on it and observe it."""

    def __init__(self, lab: Lab, workload_id: str, machines: int) -> None:
        self.id = workload_id
        self.agents = [ScriptedAgent(lab.client, f"{HOME}/c1/{workload_id}-m{i}", i) for i in range(machines)]
        nodes = [NodeLaunch(a.machine, [] if i else ["main"], {"main": [i]}) for i, a in enumerate(self.agents)]
        self.plan = launch_plan(workload_id, nodes)
        self.facts = Facts(workload_id, self.plan)
        self._lab = lab
        self._mails = itertools.count(1)
        self._handle: WorkflowHandle[Any, str] | None = None

    # ---------------------------------------------------------------------------------------------------- start and end

    async def begins(self, state: WorkloadInput | None = None) -> None:
        """Starts the workflow and the agents of its machines."""
        for agent in self.agents:
            await agent.comes()
        await self.workflow_starts(state or WorkloadInput(self.id))

    async def workflow_starts(self, state: WorkloadInput, mail: WorkloadMessage | None = None) -> None:
        """Starts the first workflow, or the replacement of a lost one; the message `mail` arrives with the start."""
        # A short timeout, so that the workflow soon receives messages although a local activity is being retried.
        self._handle = await self._lab.client.start_workflow(
            WorkloadWorkflow.run,
            state,
            id=workload_workflow_id(self.id),
            task_queue=self._lab.queue,
            task_timeout=timedelta(seconds=2),
            start_signal=None if mail is None else "mail",
            start_signal_args=[] if mail is None else [mail],
        )

    async def result(self) -> str:
        """Waits until the workflow has ended; returns the workload's final phase."""
        return await asyncio.wait_for(self.handle.result(), 20.0)

    async def close(self) -> None:
        """Terminates the workflow, if it still runs, and stops the agents."""
        if self._handle is not None and self.facts.phase not in TERMINAL_PHASES:
            with contextlib.suppress(Exception):
                await self._handle.terminate()
        for agent in self.agents:
            await agent.close()

    @property
    def handle(self) -> WorkflowHandle[Any, str]:
        """Handle of the workload's workflow."""
        assert self._handle is not None, "the workload's workflow was not started"
        return self._handle

    # --------------------------------------------------------------------------------------------- messages and waiting

    async def mail(
        self, kind: MessageKind, attempt: int | None = None, id_: int | None = None, **detail: Any
    ) -> WorkloadMessage:
        """Delivers a message, by default about the current attempt."""
        about = self.facts.attempt if attempt is None else attempt
        mail = WorkloadMessage(next(self._mails) if id_ is None else id_, kind.value, about, detail)
        await self.handle.signal("mail", mail)
        return mail

    async def award(self, *, ready: bool = True) -> None:
        """Awards the workload and delivers the message of the award."""
        self.facts.award(ready=ready)
        await self.told_of_award(ready=ready)

    async def told_of_award(self, *, ready: bool = True) -> None:
        """Delivers only the message of the award."""
        await self.mail(MessageKind.AWARDED, ready=ready, region=self.plan.region, rank=3)

    async def reaches(self, phase: Phase) -> None:
        """Waits until the workload is in a phase."""
        await until(lambda: self.facts.phase is phase, f"the phase is {phase.value}; path so far: {self.facts.path}")

    async def runs(self) -> None:
        """Waits until the workload is running and every present agent has received the run of its tasks."""
        await self.reaches(Phase.RUNNING)
        for agent in self.agents:
            if not agent.gone:
                await until(
                    lambda a=agent: any(r.attempt == self.facts.attempt for r in a.requests(Activity.RUN_NODE)),
                    f"tasks run on {agent.machine}",
                )

    async def asks(self, agent: ScriptedAgent, kind: Activity, times: int = 1) -> None:
        """Waits until an agent has received this many requests of a kind."""
        await until(
            lambda: len(agent.requests(kind)) >= times, f"{agent.machine} has received {kind.value} {times} times"
        )

    async def pending(self, kind: Activity, count: int) -> None:
        """Waits until Temporal has this many unfinished activities of a kind."""
        give_up_s = asyncio.get_running_loop().time() + 20.0
        while True:
            described = (await self.handle.describe()).raw_description
            found = sum(p.activity_type.name == kind.value for p in described.pending_activities)
            if found == count:
                return
            assert asyncio.get_running_loop().time() < give_up_s, f"unfinished {kind.value}: {found}, should be {count}"
            await asyncio.sleep(0.02)

    async def handled(self) -> list[HistoryEvent]:
        """Waits until the workflow has processed everything that has happened so far; returns its history."""
        return await handled(self.handle)

    # ------------------------------------------------------------------------------------------------------ observation

    def reason(self, index: int = -1) -> dict[str, Any]:
        """Returns the detail of a reason on the path, by default the last."""
        return self.facts.details[index]

    def stopped(self) -> list[list[tuple[int, float]]]:
        """Returns attempt and grace of the stop requests of each machine."""
        return [[(r.attempt, r.grace_s) for r in a.requests(Activity.STOP_NODE)] for a in self.agents]

    def check_releases(self) -> None:
        """Checks that every ended attempt was released once, in order, and that the current one was not."""
        over = self.facts.attempt - (1 if self.facts.phase in PLACED_PHASES else 0)
        assert [r.attempt for r in self.facts.releases] == list(range(1, over + 1))
