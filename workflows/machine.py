"""Registration of a machine. While a long activity of its agent sends heartbeats, it is alive; otherwise it is lost."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol.activities import Activity
    from domain.protocol.machines import DETACHED, Attend, Hello, MachineNotice, Pace, ProveKey, StopNode, Welcome
    from domain.task_reports import OWNER
    from workflows.activity_calls import give_up, record, stop_node, type_of

LONG_HISTORY_EVENTS = 2000
"""The workflow continues as new between two hellos once its history has this many events."""
_LAST_CHANCE_S = 10.0
_PACE_S = 60.0
_SILENT = "TemporalTimeout:Heartbeat"
"""Temporal's name of a heartbeat timeout in `non_retryable_error_types`."""


@workflow.defn(name="MachineWorkflow")
class MachineWorkflow:
    """The workflow of one machine. Its agent sends `hello` at each start, and while no attend activity runs."""

    def __init__(self) -> None:
        self._hello: Hello | None = None
        self._unconfirmed: list[tuple[str, float]] = []
        self._notices: list[MachineNotice] = []
        self._pace: Pace | None = None
        self._pacing: asyncio.Future[None] | None = None
        self._lent_at_s = 0.0
        """When the agent last said that its machine is lent, by its own clock."""

    @workflow.signal
    def hello(self, hello: Hello) -> None:
        """Signals that the agent started or restarted. Only the newest hello is kept."""
        self._hello = hello
        if not hello.taken:
            self._lent_at_s = max(self._lent_at_s, hello.at_s)
            self._notices = [notice for notice in self._notices if not self._is_over(notice)]

    @workflow.signal
    def unconfirmed(self, run: str, grace_s: float = 0.0) -> None:
        """Signals that `run` (`workload.attempt`) was released here without confirmation that its tasks have ended.

        The tasks may save for up to `grace_s` seconds.
        """
        self._unconfirmed.append((run, grace_s))

    @workflow.signal
    def noticed(self, notice: MachineNotice) -> None:
        """Signals that the platform reclaims the machine, as reported by its agent or by a task."""
        if not self._is_over(notice):
            self._notices.append(notice)

    @workflow.signal
    def paced(self, pace: Pace) -> None:
        """Signals how often the tasks on the machine should save; only the newest value counts."""
        self._pace = pace

    @workflow.run
    async def run(self, machine: str, unheard: Hello | None = None) -> None:
        """Registers the machine at each hello and monitors it until it is lost. Ends if it is unknown and refused.

        `unheard` is a hello that an earlier run of this workflow received and did not process.
        """
        self._hello = self._hello or unheard
        while workflow.info().get_current_history_length() < LONG_HISTORY_EVENTS:
            await workflow.wait_condition(lambda: self._hello is not None)
            hello, self._hello = self._hello, None
            assert hello is not None
            self._unconfirmed.clear()  # Registering reads all unconfirmed runs from Postgres.
            welcome = await record(Activity.REGISTER_MACHINE, hello, Welcome)
            if welcome.refused and (proof := await self._prove(machine, welcome)) is not None:
                welcome = await record(Activity.REGISTER_MACHINE, replace(hello, key_proof=proof), Welcome)
            if welcome.unknown and self._hello is None:
                return  # The next hello starts a new workflow.
            if welcome.refused:
                continue  # If the machine's real agent still runs, it sends another hello: no attend activity runs.
            attend = Attend(machine, hello.incarnation, welcome.stop)
            if await self._stop_all(machine, [(run, 0.0) for run in welcome.stop], welcome) is None:
                await self._attend(attend, welcome, hello)
            elif self._hello is None:
                await record(Activity.MACHINE_LOST, attend)
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(args=[machine, self._hello])

    async def _prove(self, machine: str, welcome: Welcome) -> str | None:
        """Returns the agent's proof that it holds the pinned key; None: there is no challenge, or no answer."""
        if welcome.challenge is None:
            return None
        try:
            proof: str = await workflow.execute_activity(
                Activity.PROVE_KEY.value,
                ProveKey(machine, welcome.challenge),
                task_queue=ids.agent_queue(machine),
                result_type=str,
                schedule_to_start_timeout=timedelta(seconds=welcome.lost_after_s),
                start_to_close_timeout=timedelta(seconds=welcome.heartbeat_timeout_s),
                retry_policy=RetryPolicy(maximum_attempts=3),
            )
        except ActivityError:
            return None
        return proof

    async def _stop_all(self, machine: str, runs: list[tuple[str, float]], welcome: Welcome) -> ActivityError | None:
        """Stops released runs, each within its grace; returns the first failure, after which no other run is stopped.

        The machine takes no work until this has succeeded. So a slot has one holder, even if an old task survived a
        network partition.
        """
        for run, grace_s in runs:
            workload, _, attempt = run.rpartition(".")
            try:
                await stop_node(
                    machine,
                    StopNode(workload, int(attempt), grace_s),
                    lost_after_s=welcome.lost_after_s,
                    heartbeat_timeout_s=welcome.heartbeat_timeout_s,
                )
            except ActivityError as error:
                return error
        return None

    async def _attend(self, attend: Attend, welcome: Welcome, hello: Hello) -> None:
        """Monitors the machine until the next hello, or until its agent has been away too long and the machine is lost.

        If the history gets too long, the last hello is processed again, so that the workflow continues as new.
        """
        attendance, has_detached = _attendance(attend, welcome, welcome.lost_after_s), False
        await record(Activity.MACHINE_READY, attend)
        while self._hello is None:
            if attendance.done():
                detaches = isinstance(error := attendance.exception(), ActivityError) and type_of(error) == DETACHED
                patience_s = _patience_s(error, welcome)
                # The next agent sends a hello before it attends. An agent that only detaches would keep this loop busy.
                if patience_s is None or (detaches and has_detached):
                    await record(Activity.MACHINE_LOST, attend)
                    return
                has_detached = has_detached or detaches
                attendance = _attendance(attend, welcome, patience_s)
            if self._unconfirmed and not await self._clear(attend, welcome, attendance):
                give_up(attendance)
                await record(Activity.MACHINE_LOST, attend)
                return
            await self._until(partial(self._calls_for_more, attendance))
            if self._hello is None and workflow.info().get_current_history_length() > 2 * LONG_HISTORY_EVENTS:
                self._hello = hello
        give_up(attendance)

    def _is_over(self, notice: MachineNotice) -> bool:
        """Returns whether a late notice is void, because the owner has lent the machine again since."""
        of_owner = notice.run is None and notice.notice.platform == OWNER
        return of_owner and notice.notice.at_s < self._lent_at_s

    def _calls_for_more(self, attendance: workflow.ActivityHandle[None]) -> bool:
        return attendance.done() or self._hello is not None or self._unconfirmed != []

    async def _clear(self, attend: Attend, welcome: Welcome, attendance: workflow.ActivityHandle[None]) -> bool:
        """Stops released runs on the machine, which then accepts work again. Other tasks continue to run.

        Returns False if the agent answers with a failure. If it does not answer, the attend activity finds out whether
        the machine is lost.
        """
        runs, self._unconfirmed = self._unconfirmed, []
        stopping = asyncio.ensure_future(self._stop_all(attend.machine, runs, welcome))
        await self._until(lambda: stopping.done() or attendance.done() or self._hello is not None)
        if not stopping.done():
            give_up(stopping)
        elif (failed := await stopping) is None:
            await record(Activity.MACHINE_READY, Attend(attend.machine, attend.incarnation, [run for run, _ in runs]))
        elif isinstance(failed.cause, TimeoutError):
            self._unconfirmed += runs
        else:
            return False
        return True

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds` is true. Meanwhile records notices immediately, because some give only five seconds."""
        while True:
            await workflow.wait_condition(lambda: holds() or self._notices != [] or self._pace is not None)
            if self._pace is not None:
                pace, self._pace = self._pace, None
                self._pacing = asyncio.ensure_future(_set_pace(pace))
            if not self._notices:
                if holds():
                    return
                continue
            await record(Activity.MACHINE_NOTICED, self._notices.pop(0))


async def _set_pace(pace: Pace) -> None:
    """Tells the agent how often its tasks should save. If it does not answer, their intervals simply expire."""
    with contextlib.suppress(ActivityError):
        await workflow.execute_activity(
            Activity.PACE_NODE.value,
            pace,
            task_queue=ids.agent_queue(pace.machine),
            schedule_to_close_timeout=timedelta(seconds=_PACE_S),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


def _last_chance_s(welcome: Welcome) -> float:
    """Returns how long an agent has to start attending again after a heartbeat timeout."""
    return min(_LAST_CHANCE_S, welcome.lost_after_s / 2)


def _attendance(attend: Attend, welcome: Welcome, patience_s: float) -> workflow.ActivityHandle[None]:
    """Starts the attend activity on the agent, which must begin within `patience_s` and then send heartbeats.

    Heartbeats are the main load of an idle machine on the Temporal service, so their timeout is long: it takes nearly
    all of the time after which a silent machine is lost. Only a short time remains to attend again.
    """
    return workflow.start_activity(
        Activity.ATTEND.value,
        attend,
        task_queue=ids.agent_queue(attend.machine),
        schedule_to_start_timeout=timedelta(seconds=patience_s),
        start_to_close_timeout=timedelta(days=3650),
        heartbeat_timeout=timedelta(
            seconds=welcome.heartbeat_timeout_s + welcome.lost_after_s - _last_chance_s(welcome)
        ),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=500),
            maximum_interval=timedelta(seconds=5),
            non_retryable_error_types=[_SILENT, DETACHED],
        ),
    )


def _patience_s(error: BaseException | None, welcome: Welcome) -> float | None:
    """Returns how long an agent has to start attending again after the activity failed; None: the machine is lost."""
    if isinstance(error, ActivityError):
        if isinstance(error.cause, TimeoutError) and error.cause.type == TimeoutType.HEARTBEAT:
            return _last_chance_s(welcome)
        if type_of(error) == DETACHED:
            return welcome.lost_after_s
    return None
