"""One attempt of a workload: follows the table of steps (`domain.lifecycle.attempts`) and carries out each step."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.lifecycle.attempts import TABLES, End, Step, StepOutcome
    from domain.lifecycle.endings import (
        STOPS,
        STOPS_EARLY,
        Ending,
        code_of,
        completed,
        lost_machine,
        stopped_early,
        unless_completed,
        why_stopped,
    )
    from domain.lifecycle.gangs import GangEnd, LaunchFailure
    from domain.lifecycle.launch_limits import is_only_launch
    from domain.phases import Phase
    from domain.protocol.activities import Activity
    from domain.protocol.leases import ElementResult
    from domain.protocol.workload_messages import MessageKind, WorkloadMessage
    from domain.protocol.workloads import (
        CheckpointCopy,
        FlushedRequest,
        LaunchPlan,
        StageRequest,
        TransitionRequest,
        WorkloadInput,
    )
    from domain.reasons import Reason, ReasonCode
    from domain.task_reports import OWNER, TaskProgress
    from workflows.activity_calls import give_up, on_region, record, show_in_temporal
    from workflows.flushes import PendingSaves
    from workflows.gang import GangTasks
    from workflows.inbox import Inbox
    from workflows.lane import Lane
    from workflows.verdicts import Verdicts

_COPY_S = 6 * 3600.0
_LONGEST_PAUSE_S = 30.0
"""The maximum backoff between two launches of a workload that fails to start repeatedly."""


async def transition(
    state: WorkloadInput,
    phase: Phase,
    reason: Reason,
    provisioning: Reason | None = None,
    launch_s: float | None = None,
) -> bool:
    """Moves the workload to a phase; returns False if a newer attempt has been awarded.

    `provisioning` and `launch_s` are those of `TransitionRequest`.
    """
    show_in_temporal(phase=phase.value, reason=reason.code.value)
    before = None if provisioning is None else provisioning.to_json()
    request = TransitionRequest(state.workload_id, state.attempt, phase.value, reason.to_json(), before, launch_s)
    return await record(Activity.TRANSITION, request, bool)


class AttemptRun:
    """The current attempt of a workload. `follow` runs it to its end."""

    def __init__(
        self, state: WorkloadInput, inbox: Inbox, flushes: PendingSaves, verdicts: Verdicts, *, ready: bool
    ) -> None:
        """`ready`: the attempt holds all of its slots. `flushes`: earlier attempts whose tasks still save."""
        self._state = state
        self._inbox = inbox
        self._flushes = flushes
        self._verdicts = verdicts
        self._ready = ready
        self.gang: GangTasks | None = None
        """The gang, once the attempt may have tasks."""
        self.elements: list[ElementResult] = []
        """The results of a runner's last array elements that are known at the end of the attempt."""
        self._lane: Lane | None = None
        self._known: LaunchPlan | None = None
        self._told: WorkloadMessage | None = None
        self._failed: LaunchFailure | None = None
        self._found: GangEnd | None = None
        """The result of stopping the tasks that an earlier workflow may have started."""
        self._leaving: Reason | None = None
        self._timed_out = False
        self._started_s = 0.0
        self._launch_s: float | None = None
        self._steps: dict[Step, Callable[[], Awaitable[StepOutcome]]] = {
            Step.WAIT: self._wait,
            Step.STAGE: self._stage,
            Step.AWAIT_SAVES: self._await_saves,
            Step.COPY: self._copy,
            Step.PREPARE: self._prepare,
            Step.RUN: self._run,
            Step.STOP: self._stop,
            Step.LEAVE: self._leave,
            Step.WITHDRAW: self._withdraw,
            Step.WIND_UP: self._wind_up,
        }
        self._ends: dict[End, Callable[[], Awaitable[Ending]]] = {
            End.TOLD_EARLY: self._told_early,
            End.NOT_STARTED: self._not_started,
            End.JUDGED: self._judged,
            End.LEFT: self._left,
            End.WOUND_UP: self._wound_up,
        }

    async def follow(self, step: Step) -> Ending:
        """Carries out `step` and the following steps of the table; returns how the attempt ended."""
        table = TABLES[self._state.table]
        while True:
            target = table[step].after[await self._steps[step]()]
            if isinstance(target, End):
                await self.settle()
                return await self._ends[target]()
            step = target

    async def settle(self) -> None:
        """Collects the known results of a runner's last array elements, after its tasks have ended or were stopped."""
        if (gang := self.gang) is not None and self._known is not None and self._known.runs_elements:
            lane = self._lane or Lane(self._state.workload_id, self._state.attempt, self._known)
            self.elements = await lane.settle(gang.elements, silent=bool(gang.silent))

    async def find(self) -> tuple[GangTasks, LaunchPlan]:
        """Returns the gang and the launch plan as recorded in Postgres, even if another workflow started the gang."""
        where = StageRequest(self._state.workload_id, self._state.attempt, winds_up=True)
        self._known = await record(Activity.STAGE, where, LaunchPlan)
        self.gang = GangTasks(self._state.workload_id, self._state.attempt, self._known)
        return self.gang, self._known

    def held_on(self, end: Ending) -> list[str]:
        """Returns the machines that may hold checkpoints of the workload in memory after this attempt, sorted.

        Where all tasks have succeeded, the agent has ended the memory server by itself.
        """
        plan = self._known
        own = set() if plan is None or not plan.holds_memory else {node.machine for node in plan.nodes}
        before = set(self._state.held_on)
        return sorted(before - own if end.phase is Phase.SUCCEEDED else before | own)

    @property
    def _plan(self) -> LaunchPlan:
        assert self._known is not None
        return self._known

    def _running(self) -> GangTasks:
        assert self.gang is not None
        return self.gang

    # ------------------------------------------------------------------------------------------------- before tasks run

    async def _wait(self) -> StepOutcome:
        if self._ready:
            return StepOutcome.DONE
        fetching = asyncio.ensure_future(self._fetch_images()) if self._state.brings_image else None
        message = await self._inbox.next({MessageKind.SLOTS_READY, *STOPS_EARLY})
        if fetching is not None:
            give_up(fetching)
        return StepOutcome.DONE if message.kind == MessageKind.SLOTS_READY else self._is_told(message)

    async def _fetch_images(self) -> None:
        """Lets agents fetch the images while victims still save. `_prepare` repeats fetches that fail here."""
        state = self._state
        plan = await record(Activity.STAGE, StageRequest(state.workload_id, state.attempt), LaunchPlan)
        await GangTasks(state.workload_id, state.attempt, plan).fetch_images()

    async def _stage(self) -> StepOutcome:
        stage = StageRequest(self._state.workload_id, self._state.attempt, may_run=not self._flushes)
        plan = await self._inbox.unless_told(record(Activity.STAGE, stage, LaunchPlan))
        if isinstance(plan, WorkloadMessage):
            return self._is_told(plan)
        self._known = plan
        if not plan.starts_at_once:
            show_in_temporal(region=plan.region)
        return StepOutcome.DONE

    async def _await_saves(self) -> StepOutcome:
        told = await self._inbox.unless_told(self._flushes.saved()) if self._flushes else None
        return StepOutcome.DONE if told is None else self._is_told(told)

    async def _copy(self) -> StepOutcome:
        """Copies the checkpoint to the store of the attempt's cluster or region, if it is in another store."""
        source, region = self._plan.checkpoint_region, self._plan.region
        at, to = self._plan.checkpoint_store, self._plan.store_url
        if source is None or not self._plan.needs_copy:
            return StepOutcome.DONE
        reason = Reason(ReasonCode.COPYING_CHECKPOINT, {"source": at or source, "region": to or region})
        await transition(self._state, Phase.MIGRATING, reason)
        copy = CheckpointCopy(self._state.workload_id, self._state.attempt, source, region, at, to)
        copying = on_region(Activity.COPY_CHECKPOINT, copy, region, start_to_close_s=_COPY_S)
        copied = await self._inbox.unless_told(copying)
        return self._is_told(copied) if isinstance(copied, WorkloadMessage) else StepOutcome.DONE

    async def _prepare(self) -> StepOutcome:
        """Sends prepare requests to the agents, unless run requests also prepare (`LaunchPlan.starts_at_once`)."""
        plan, state = self._plan, self._state
        if plan.starts_at_once:
            self.gang = GangTasks(state.workload_id, state.attempt, plan)
            return StepOutcome.DONE
        await transition(state, Phase.PROVISIONING, plan.starting)
        await record(Activity.STAGED_HERE, StageRequest(state.workload_id, state.attempt))
        gang, began_s = GangTasks(state.workload_id, state.attempt, plan), workflow.time()
        self.gang = gang
        failed = await self._inbox.unless_told(gang.prepare())
        self._launch_s = workflow.time() - began_s
        if isinstance(failed, WorkloadMessage):
            return self._is_told(failed)
        if gang.stopped_before:
            return StepOutcome.STOPPED_BEFORE
        self._failed = failed
        return StepOutcome.DONE if failed is None else StepOutcome.REFUSED

    def _is_told(self, message: WorkloadMessage) -> StepOutcome:
        self._told = message
        return StepOutcome.TOLD

    async def _withdraw(self) -> StepOutcome:
        lost, failed = lost_machine(self._told), self._failed
        if failed is not None and failed.timed_out:
            lost = failed.blames_machine
        self._found = await self._end_all(lost)
        return StepOutcome.DONE

    async def _wind_up(self) -> StepOutcome:
        self._found = await self._end_all(None)
        return StepOutcome.DONE

    async def _end_all(self, lost: str | None) -> GangEnd:
        """Stops all tasks that still run; returns how the gang ended."""
        await self._running().stop(self._plan.grace_s, lost=lost)
        return await self._running().result()

    # ---------------------------------------------------------------------------------------------------------- running

    async def _run(self) -> StepOutcome:
        """Runs the gang until it ends, a message asks it to stop, or its maximum runtime is used up."""
        gang, plan, state = self._running(), self._plan, self._state
        self._started_s = workflow.time()
        gang.start()
        if plan.runs_elements:
            self._lane = Lane(state.workload_id, state.attempt, plan)
            self._lane.start()
        if plan.is_running:
            show_in_temporal(phase=Phase.RUNNING.value, reason=ReasonCode.RUNNING.value)
        else:
            # The activity adds the start time to the reason.
            running = Reason(ReasonCode.RUNNING, {"region": plan.region})
            before = plan.starting if plan.starts_at_once else None
            await transition(state, Phase.RUNNING, running, before, self._launch_s)
        left_s = None if plan.max_runtime_s is None else max(0.0, plan.max_runtime_s - state.ran_s)
        try:
            await self._until_stopped(gang, None if left_s is None else timedelta(seconds=left_s))
        except TimeoutError:
            self._timed_out = True
            return StepOutcome.TIMED_OUT
        self._told = None if gang.ended else await self._inbox.next(STOPS)
        self._leaving = self._why_leaving(gang)
        if self._leaving is not None:
            if _takes_at_once(self._leaving):
                gang.withdraw(str(self._leaving.detail["machine"]))
            return StepOutcome.NOTICED
        return StepOutcome.DONE if self._told is None else StepOutcome.TOLD

    async def _until_stopped(self, gang: GangTasks, timeout: timedelta | None) -> None:
        """Waits until the gang has ended or a message asks to stop it. Passes cancelled elements on to a runner."""
        wanted = STOPS if self._lane is None else STOPS | {MessageKind.CANCEL_ELEMENT}
        while True:
            await workflow.wait_condition(lambda: gang.ended or self._inbox.has(wanted), timeout=timeout)
            if self._lane is None or gang.ended or self._inbox.has(STOPS):
                return
            message = await self._inbox.next({MessageKind.CANCEL_ELEMENT})
            await self._lane.cancel([int(message.detail["index"])])

    async def _stop(self) -> StepOutcome:
        gang = self._running()
        if not gang.ended:
            ran_s = self._state.ran_s + workflow.time() - self._started_s
            await transition(self._state, Phase.CHECKPOINTING, why_stopped(self._told, self._plan, ran_s))
            await self._drain(gang)
            ends = self._told is not None and self._told.kind == MessageKind.CANCEL
            if self._lane is not None and ends:
                await self._lane.cancel([])
            await gang.stop(self._plan.grace_s, lost=lost_machine(self._told), ends=ends)
        return StepOutcome.DONE

    async def _drain(self, gang: GangTasks) -> None:
        """Lets serving tasks complete the requests in progress.

        Because of the phase that was just written, the service sends these tasks no new requests. The wait ends early
        if the service reports that no request is in progress, if a task ends, if a machine is lost, or if another
        message cancels the workload. A service drains a replica before it cancels it, so a cancellation does not wait.
        """
        drain_s, told = self._plan.drain_s, self._told
        if not drain_s or (told is not None and told.kind in (MessageKind.MACHINE_LOST, MessageKind.CANCEL)):
            return
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: gang.ended or self._inbox.has({MessageKind.CANCEL, MessageKind.MACHINE_LOST, MessageKind.IDLE}),
                timeout=timedelta(seconds=drain_s),
            )

    def _why_leaving(self, gang: GangTasks) -> Reason | None:
        """Returns why the workload returns to the queue before its tasks have ended; None: it waits for the tasks.

        A workload that serves always waits: it has nothing to save, and its tasks serve until they are stopped. A
        runner always waits too: its elements may be leased again only when they have ended.
        """
        if not gang.still_running or self._plan.drain_s is not None or self._lane is not None:
            return None
        if self._told is None:
            return gang.noticed
        # After an eviction or a cancellation, the end of the tasks is awaited.
        code = code_of(self._told)
        if code != ReasonCode.PLATFORM_NOTICE or self._inbox.has({MessageKind.EVICT, MessageKind.CANCEL}):
            return None
        return Reason(code, self._told.detail)

    async def _leave(self) -> StepOutcome:
        """Returns the workload to the queue while its tasks save, because of a platform notice.

        The following order is correct even if a process is slow or dies:

        1. The tasks receive their notice and have their grace to save. Their machines take no other work until the end
           of the tasks is confirmed (`ReleaseRequest.silent_machines`), so no other attempt can hold their slots.
        2. The attempt is released without waiting for the tasks. Meanwhile the next attempt is awarded, evicts its
           victims and writes its launch description, which are the long steps.
        3. The next attempt waits for the end of the tasks or of their grace (`PendingSaves`) before it does anything
           that
           would disturb the save. Copying the checkpoint to another region fences the source, and the first action of
           the new tasks is to claim the checkpoints. Either would reject the running save and lose its work.
        4. Then the next attempt claims the checkpoints. If an old task still runs because its machine is partitioned,
           its later saves are rejected by the newer attempt number, so the loaded checkpoint stays the newest.
        """
        assert self._leaving is not None
        await transition(self._state, Phase.CHECKPOINTING, self._leaving)
        self._state.hangs = 0
        self._flushes.begin(self._flush(self._state.attempt), self._plan.grace_s)
        return StepOutcome.DONE

    async def _flush(self, attempt: int) -> None:
        """Stops the gang of the released attempt, and records the last reports of its tasks.

        If all of its tasks had finished, which the workflow did not know in time, the workload is complete.
        """
        suspicion = self._verdicts.suspicion()
        end = await self._end_all(None)
        self._state.ran_s += workflow.time() - self._started_s
        self._verdicts.count_late(end, self._plan, suspicion)
        await record(Activity.FLUSHED, FlushedRequest(self._state.workload_id, attempt, list(end.progress)))
        if end.all_succeeded:
            done = completed(self._plan)
            self._inbox.put_for_any(
                WorkloadMessage(0, MessageKind.FINISHED, 0, {**done.detail, "code": done.code.value})
            )

    # ------------------------------------------------------------------------------------------------------------- ends

    async def _told_early(self) -> Ending:
        assert self._told is not None
        return stopped_early(self._told)

    async def _not_started(self) -> Ending:
        assert self._found is not None
        if self._told is not None:
            return unless_completed(stopped_early(self._told), self._found, self._plan)
        assert self._failed is not None
        if self._found.all_succeeded or self._found.failed:
            return self._verdicts.judge(self._found, self._plan, None)
        return await self._refused(self._failed, self._found.progress)

    async def _judged(self) -> Ending:
        end = await self._running().result()
        ran_s = workflow.time() - self._started_s
        if not self._never_ran(end, ran_s):
            self._state.ran_s += ran_s
        ending = self._verdicts.judge(end, self._plan, self._told, self._timed_out)
        if end.refused is not None and ending.reason == end.refused.reason:
            return await self._refused(end.refused, end.progress)
        self._state.refusals = 0
        if end.stopped_before and ending.reason.code == ReasonCode.STACK_STOPPED:
            return await self._stopped_before(ending)
        self._state.stops = 0
        return ending

    def _never_ran(self, end: GangEnd, ran_s: float) -> bool:
        """Returns whether a machine refused or failed to start the tasks: the time does not count as their runtime."""
        late = self._told is not None and self._told.detail.get("code") == ReasonCode.LAUNCH_TIMED_OUT
        if not (late or end.refused is not None) or end.failed:
            return False
        return is_only_launch(ran_s, timed_out=late, reported=end.reported)

    async def _left(self) -> Ending:
        assert self._leaving is not None
        return Ending(Phase.PREEMPTED, self._leaving, flushing_s=self._plan.grace_s)

    async def _wound_up(self) -> Ending:
        """Returns the ending after the tasks of an earlier workflow were stopped.

        If the gang had already ended by itself, its ending is judged as usual.
        """
        assert self._found is not None
        inbox, end = self._inbox, self._found
        cancel = await inbox.next({MessageKind.CANCEL}) if inbox.has({MessageKind.CANCEL}) else None
        if cancel is not None or end.all_succeeded or end.failed:
            return self._verdicts.judge(end, self._plan, cancel)
        ending = Ending(Phase.PREEMPTED, Reason(ReasonCode.STACK_STOPPED), end.progress)
        return await self._stopped_before(ending) if self._running().stopped_before else ending

    async def _stopped_before(self, ending: Ending) -> Ending:
        """Returns the ending of an attempt that an agent claims to have stopped; after a second claim, with a backoff.

        After a restart of the installation the claim is true once. A volunteer's agent could repeat it for ever and
        would be given the workload again and again. These attempts are not counted as refusals.
        """
        self._state.stops += 1
        if self._state.stops == 1:
            return ending
        return await self._after_backoff(ending, self._state.stops)

    async def _refused(self, failed: LaunchFailure, progress: tuple[TaskProgress, ...]) -> Ending:
        """Returns the ending after a failed launch: the workload fails, or is queued again.

        If only one lent machine blames the workload, neither the workload nor the machine is blamed.

        From the second consecutive failure on, the workload is queued again after a backoff. Otherwise the scheduler
        would place it on the same machines within a second.
        """
        if failed.blames_workload:
            failed = self._verdicts.doubted(failed) or failed
        again = Ending(Phase.PENDING, failed.reason, progress, failed.blames_machine)
        self._state.refusals += 1
        if failed.blames_workload:
            return Ending(Phase.FAILED, failed.reason, progress)
        if self._state.refusals == 1:
            return again
        return await self._after_backoff(again, self._state.refusals)

    async def _after_backoff(self, ending: Ending, times: int) -> Ending:
        """Waits for a backoff that grows with `times`, then returns the ending. A message may end the wait early."""
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (times - 2))
        told = await self._inbox.unless_told(asyncio.sleep(pause_s))
        return replace(stopped_early(told), progress=ending.progress) if isinstance(told, WorkloadMessage) else ending


def _takes_at_once(leaving: Reason) -> bool:
    """Returns whether the owner takes a machine back without notice, so that its agent kills the tasks."""
    at_s, ends_at_s = leaving.detail.get("at_s"), leaving.detail.get("ends_at_s")
    if leaving.detail.get("platform") != OWNER or not isinstance(at_s, float | int):
        return False
    return isinstance(ends_at_s, float | int) and ends_at_s <= at_s
