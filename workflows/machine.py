"""A machine's registration: known alive by one long heartbeating activity, lost when that stops."""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol import Activity, Attend, Hello, StopNode, Welcome
    from workflows.effects import give_up, record, stop_node

LONG_HISTORY_EVENTS = 2000
"""A history of this length is continued in a new one, between two hellos."""


@workflow.defn(name="MachineWorkflow")
class MachineWorkflow:
    """One for each machine. Its agent says `hello` at each start, and while nobody attends to it."""

    def __init__(self) -> None:
        self._hello: Hello | None = None
        self._unconfirmed: list[str] = []

    @workflow.signal
    def hello(self, hello: Hello) -> None:
        """The agent (re)started; only the newest counts."""
        self._hello = hello

    @workflow.signal
    def unconfirmed(self, run: str) -> None:
        """A gang gave up `run` (`workload.attempt`) here and could not ask whether its tasks have ended."""
        self._unconfirmed.append(run)

    @workflow.run
    async def run(self, machine: str, unheard: Hello | None = None) -> None:
        """Registers the machine at each hello and attends to it until it is lost. `unheard`: of an earlier run."""
        self._hello = self._hello or unheard
        while workflow.info().get_current_history_length() < LONG_HISTORY_EVENTS:
            await workflow.wait_condition(lambda: self._hello is not None)
            hello, self._hello = self._hello, None
            assert hello is not None
            self._unconfirmed.clear()  # What was given up so far, registering finds out.
            welcome = await record(Activity.REGISTER_MACHINE, hello, Welcome)
            attend = Attend(machine, hello.incarnation, welcome.stop)
            if await self._stop_all(machine, welcome.stop, welcome):
                await self._attend(attend, welcome)
            elif self._hello is None:
                await record(Activity.MACHINE_LOST, attend)
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(args=[machine, self._hello])

    async def _stop_all(self, machine: str, runs: list[str], welcome: Welcome) -> bool:
        """Stops runs that were given up while the agent could not be asked; False if it is gone again.

        Nothing is placed on a machine before this: a slot has one holder even where the old one outlived a partition.
        """
        for run in runs:
            workload, _, attempt = run.rpartition(".")
            try:
                await stop_node(
                    machine,
                    StopNode(workload, int(attempt), 0.0),
                    lost_after_s=welcome.lost_after_s,
                    heartbeat_timeout_s=welcome.heartbeat_timeout_s,
                )
            except ActivityError:
                return False
        return True

    async def _attend(self, attend: Attend, welcome: Welcome) -> None:
        """Until the next hello. The machine counts as lost when heartbeats stop and its agent does not come back."""
        handle = workflow.start_activity(
            Activity.ATTEND.value,
            attend,
            task_queue=ids.agent_queue(attend.machine),
            schedule_to_start_timeout=timedelta(seconds=welcome.lost_after_s),
            start_to_close_timeout=timedelta(days=3650),
            heartbeat_timeout=timedelta(seconds=welcome.heartbeat_timeout_s),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=5)
            ),
        )
        await record(Activity.MACHINE_READY, attend)
        while not handle.done() and self._hello is None:
            if self._unconfirmed:
                await self._clear(attend, welcome, handle)
            await workflow.wait_condition(lambda: handle.done() or self._hello is not None or self._unconfirmed != [])
        if not handle.done():
            give_up(handle)
            return
        try:
            await handle
        except ActivityError:
            await record(Activity.MACHINE_LOST, attend)

    async def _clear(self, attend: Attend, welcome: Welcome, attendance: workflow.ActivityHandle[None]) -> None:
        """Stops what gangs gave up here; then work may be placed again. Other gangs' tasks go on meanwhile."""
        runs, self._unconfirmed = self._unconfirmed, []
        stopping = asyncio.ensure_future(self._stop_all(attend.machine, runs, welcome))
        await workflow.wait_condition(lambda: stopping.done() or attendance.done() or self._hello is not None)
        if not stopping.done():
            give_up(stopping)
        elif await stopping:
            await record(Activity.MACHINE_READY, Attend(attend.machine, attend.incarnation, runs))
        else:
            self._unconfirmed += runs
