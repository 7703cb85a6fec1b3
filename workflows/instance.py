"""The lifecycle of an instance: launch, wait for its agent, serve, drain, terminate (`domain.lifecycle.instances`)."""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from domain.lifecycle.instances import (
        FIRST_STEPS,
        INSTANCE_TABLES,
        InstanceEvent,
        InstancePhase,
        InstanceStep,
    )
    from domain.protocol.activities import Activity
    from domain.protocol.instances import InstanceFacts, InstanceInput, InstanceMove, InstanceRef
    from workflows.activity_calls import give_up, record

_ASKS_S = 120.0
"""The timeout of one call to a provider."""
_SILENT_S = 15.0
"""The heartbeat timeout of a call to a provider. After it, another worker repeats the call."""
_AGAIN = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60))
LONG_HISTORY_EVENTS = 2000
"""A workflow with a longer history continues in a new run. Providers may fail for days, machines serve for months."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
"""The first and the longest interval of polls for events that send no signal: a machine is empty, or a provider's list
no longer contains it."""


@workflow.defn(name="InstanceWorkflow")
class InstanceWorkflow:
    """The workflow of one instance, until it is gone. All facts are in the ledger; a signal says that they changed."""

    def __init__(self) -> None:
        self._looks = 0
        self._ref = InstanceRef("")
        # The input of a new run: the present phase, with the times that are left.
        self._left = InstanceInput("", InstancePhase.REQUESTED, 1, 0.0, 0.0)

    @workflow.signal
    def refresh(self) -> None:
        """Signals that the instance changed in the ledger."""
        self._looks += 1

    @workflow.run
    async def run(self, start: InstanceInput) -> None:
        """Carries out the steps of the table. A workflow that replaces a lost one starts at the step of the phase."""
        self._ref, self._left = InstanceRef(start.instance), start
        steps = {
            InstanceStep.LAUNCH: self._launch,
            InstanceStep.AWAIT_AGENT: self._await_agent,
            InstanceStep.SERVE: self._serve,
            InstanceStep.DRAIN: self._drain,
            InstanceStep.TERMINATE: self._terminate,
        }
        table = INSTANCE_TABLES[start.table]
        step: InstanceStep | None = FIRST_STEPS[InstancePhase(start.phase)]
        event: InstanceEvent | None = None
        shown: InstancePhase | None = None
        while step is not None:
            if table[step].phase is not shown:
                shown = table[step].phase
                await self._show(shown, event)
            event = await steps[step]()
            step = table[step].after[event]
        await self._show(InstancePhase.GONE, event)
        await workflow.wait_condition(workflow.all_handlers_finished)

    async def _show(self, phase: InstancePhase, because: InstanceEvent | None) -> None:
        self._left = replace(self._left, phase=phase.value)
        moved = InstanceMove(self._ref.instance, phase.value, "" if because is None else because.value)
        await record(Activity.MOVE_INSTANCE, moved)

    async def _inspect(self) -> InstanceFacts:
        return await record(Activity.INSPECT_INSTANCE, self._ref, InstanceFacts)

    # ---------------------------------------------------------------------------------------------------------- steps

    async def _launch(self) -> InstanceEvent:
        """Sends the launch request until the provider answers, or until the instance is marked to end."""
        asking = workflow.start_activity(
            Activity.LAUNCH_INSTANCE.value,
            self._ref,
            result_type=bool,
            start_to_close_timeout=timedelta(seconds=_ASKS_S),
            heartbeat_timeout=timedelta(seconds=_SILENT_S),
            retry_policy=_AGAIN,
        )
        while not asking.done():
            seen = self._looks
            if (await self._inspect()).told:
                give_up(asking)
                return InstanceEvent.TOLD
            await workflow.wait_condition(partial(self._heard, asking, seen))
        launched: bool = await asking
        return InstanceEvent.DONE if launched else InstanceEvent.REFUSED

    def _heard(self, asking: workflow.ActivityHandle[bool], seen: int) -> bool:
        return asking.done() or self._looks != seen

    async def _await_agent(self) -> InstanceEvent:
        """Waits for the agent, at most `join_s` from the start of the machine. It may wait at the provider for days."""
        join_s = self._left.join_s
        give_up_at: float | None = None
        while True:
            seen = self._looks
            facts = await self._inspect()
            if (event := _event_of(facts)) is not None:
                return event
            if facts.ready:
                return InstanceEvent.DONE
            if facts.waits:
                give_up_at = None
            elif give_up_at is None:
                give_up_at = workflow.time() + join_s
            self._renew(join_s=join_s if give_up_at is None else give_up_at - workflow.time())
            if not await self._looked(seen, None if give_up_at is None else give_up_at - workflow.time()):
                return InstanceEvent.TIMED_OUT

    async def _serve(self) -> InstanceEvent:
        while True:
            seen = self._looks
            if (event := _event_of(await self._inspect())) is not None:
                return event
            self._renew()
            await self._looked(seen, None)

    async def _drain(self) -> InstanceEvent:
        give_up_at, pause_s = workflow.time() + self._left.drain_s, _FIRST_PAUSE_S
        await record(Activity.DRAIN_INSTANCE, self._ref)
        while True:
            seen = self._looks
            facts = await self._inspect()
            if facts.lost:
                return InstanceEvent.LOST
            if not facts.held:
                return InstanceEvent.DONE
            left_s = give_up_at - workflow.time()
            if left_s <= 0:
                return InstanceEvent.TIMED_OUT
            self._renew(drain_s=left_s)
            await self._looked(seen, min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _terminate(self) -> InstanceEvent:
        pause_s = _FIRST_PAUSE_S
        while not await self._ask_to_end():
            self._renew(drain_s=0.0)
            await workflow.sleep(timedelta(seconds=pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return InstanceEvent.DONE

    async def _ask_to_end(self) -> bool:
        gone: bool = await workflow.execute_activity(
            Activity.TERMINATE_INSTANCE.value,
            self._ref,
            result_type=bool,
            start_to_close_timeout=timedelta(seconds=_ASKS_S),
            heartbeat_timeout=timedelta(seconds=_SILENT_S),
            retry_policy=_AGAIN,
        )
        return gone

    def _renew(self, join_s: float | None = None, drain_s: float | None = None) -> None:
        """Continues in a new run if the history is long. The new run repeats the present step, with the times left."""
        info = workflow.info()
        if info.is_continue_as_new_suggested() or info.get_current_history_length() > LONG_HISTORY_EVENTS:
            join_s = self._left.join_s if join_s is None else join_s
            drain_s = self._left.drain_s if drain_s is None else drain_s
            workflow.continue_as_new(replace(self._left, join_s=join_s, drain_s=drain_s))

    async def _looked(self, seen: int, timeout_s: float | None) -> bool:
        """Waits until more than `seen` signals have arrived; returns False on a timeout."""
        if timeout_s is not None and timeout_s <= 0:
            return False
        timeout: Any = None if timeout_s is None else timedelta(seconds=timeout_s)
        try:
            await workflow.wait_condition(lambda: self._looks != seen, timeout=timeout)
        except TimeoutError:
            return False
        return True


def _event_of(facts: InstanceFacts) -> InstanceEvent | None:
    """Returns the event that ends the current step early: the instance is lost or marked to end; None: neither."""
    if facts.lost:
        return InstanceEvent.LOST
    return InstanceEvent.TOLD if facts.told else None
