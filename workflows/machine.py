"""A machine's registration: known alive by one long heartbeating activity, lost when that stops."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol import Activity, Attend, Hello, MachineNotice, ProveKey, StopNode, Welcome
    from workflows.effects import give_up, record, stop_node

LONG_HISTORY_EVENTS = 2000
"""A history of this length is continued in a new one, between two hellos."""


@workflow.defn(name="MachineWorkflow")
class MachineWorkflow:
    """One for each machine. Its agent says `hello` at each start, and while nobody attends to it."""

    def __init__(self) -> None:
        self._hello: Hello | None = None
        self._unconfirmed: list[tuple[str, float]] = []
        self._notices: list[MachineNotice] = []

    @workflow.signal
    def hello(self, hello: Hello) -> None:
        """The agent (re)started; only the newest counts."""
        self._hello = hello

    @workflow.signal
    def unconfirmed(self, run: str, grace_s: float = 0.0) -> None:
        """A gang gave up `run` (`workload.attempt`) here before its tasks have ended, for all that it knows.

        They may go on for `grace_s` to save.
        """
        self._unconfirmed.append((run, grace_s))

    @workflow.signal
    def noticed(self, notice: MachineNotice) -> None:
        """A platform takes the machine, by its agent's or a task's word."""
        self._notices.append(notice)

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
            if welcome.refused and (proof := await self._prove(machine, welcome)) is not None:
                welcome = await record(Activity.REGISTER_MACHINE, replace(hello, key_proof=proof), Welcome)
            if welcome.refused:
                continue  # Whoever it was: the machine's own agent says hello again while nobody attends to it.
            attend = Attend(machine, hello.incarnation, welcome.stop)
            if await self._stop_all(machine, [(run, 0.0) for run in welcome.stop], welcome):
                await self._attend(attend, welcome)
            elif self._hello is None:
                await record(Activity.MACHINE_LOST, attend)
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(args=[machine, self._hello])

    async def _prove(self, machine: str, welcome: Welcome) -> str | None:
        """The answer of the machine's agent to a challenge that only the holder of the pinned key can open."""
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

    async def _stop_all(self, machine: str, runs: list[tuple[str, float]], welcome: Welcome) -> bool:
        """Stops runs that were given up, each within its grace; False if the agent is gone again.

        Nothing is placed on a machine before this: a slot has one holder even where the old one outlived a partition.
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
            await self._until(lambda: handle.done() or self._hello is not None or self._unconfirmed != [])
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
        await self._until(lambda: stopping.done() or attendance.done() or self._hello is not None)
        if not stopping.done():
            give_up(stopping)
        elif await stopping:
            await record(Activity.MACHINE_READY, Attend(attend.machine, attend.incarnation, [run for run, _ in runs]))
        else:
            self._unconfirmed += runs

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Until `holds`; notices that come meanwhile are passed on at once: some leave five seconds."""
        while True:
            await workflow.wait_condition(lambda: holds() or self._notices != [])
            if not self._notices:
                return
            await record(Activity.MACHINE_NOTICED, self._notices.pop(0))
