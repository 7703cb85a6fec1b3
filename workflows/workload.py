"""The life of one workload: waits for an award, launches its gang, watches it, stops and releases it, and again."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Set
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from domain.phases import TERMINAL_PHASES, Phase
    from domain.protocol import (
        TASKS_MAY_RUN,
        Activity,
        CheckpointCopy,
        FlushedRequest,
        LaunchPlan,
        Mail,
        MailKind,
        ReleaseRequest,
        StageRequest,
        TransitionRequest,
        WorkloadInput,
    )
    from domain.reasons import Reason, ReasonCode
    from domain.reported import TaskProgress
    from lifecycle.endings import STOPS, Ending, code_of, lost_machine, stopped_early, unless_completed, why_stopped
    from lifecycle.gangs import LaunchFailure
    from workflows.effects import give_up, on_region, record, show_in_temporal, type_of
    from workflows.flushes import Flushes
    from workflows.gang import Gang
    from workflows.verdicts import Verdicts, minds_reports

T = TypeVar("T")

TAKES_OVER = "takes-over-attempts"
"""Patch: a workflow that replaces one that is gone goes on with the attempt, instead of stopping its tasks."""
JUDGES_LAUNCHES = "judges-launches"
"""Patch: a launch that fails by the workload's own fault fails it; others are tried again after a pause."""
LONG_HISTORY_EVENTS = 2000
"""A history of this length is continued in a new one, between two attempts."""
_REMEMBERED_MAIL = 100
_COPY_S = 6 * 3600.0
_LONGEST_PAUSE_S = 30.0
"""Between two launches of a workload that keeps failing to start."""


@workflow.defn(name="WorkloadWorkflow")
class WorkloadWorkflow:
    """One for each workload, from submission to its end. All news come as `mail`."""

    @workflow.init
    def __init__(self, state: WorkloadInput) -> None:
        # Before the first signal: what an earlier run has seen is a repetition for this one, too.
        self._state = state
        self._mails: deque[Mail] = deque(state.mails)
        self._seen: deque[int] = deque(state.seen_mail, maxlen=_REMEMBERED_MAIL)
        self._gang: Gang | None = None
        """That of the present attempt, once it may have tasks."""
        self._flushes = Flushes()
        self._verdicts = Verdicts(state)

    @workflow.signal
    def mail(self, mail: Mail) -> None:
        """Takes a message from the outbox; a repetition is dropped."""
        if mail.id not in self._seen:
            self._seen.append(mail.id)
            self._mails.append(mail)

    @workflow.run
    async def run(self, state: WorkloadInput) -> str:
        """Runs the workload to its end; the final phase is the result."""
        taken_over = await self._take_over() if state.placed else None
        while True:
            end, taken_over = taken_over or await self._one_attempt(), None
            show_in_temporal(phase=end.phase.value, reason=end.reason.code.value)
            if end.phase in TERMINAL_PHASES:
                await self._flushes.ended()
                await workflow.wait_condition(workflow.all_handlers_finished)
                return end.phase.value
            info = workflow.info()
            if info.is_continue_as_new_suggested() or info.get_current_history_length() > LONG_HISTORY_EVENTS:
                await self._flushes.ended()
                await workflow.wait_condition(workflow.all_handlers_finished)
                self._state.placed = False
                self._state.mails = list(self._mails)
                self._state.seen_mail = list(self._seen)
                workflow.continue_as_new(self._state)

    # ------------------------------------------------------------------------------------------------------- attempts

    async def _one_attempt(self) -> Ending:
        """From the queue to the queue or the end."""
        mail = await self._next_mail({MailKind.AWARDED, MailKind.CANCEL})
        if mail.kind == MailKind.CANCEL:
            expired = code_of(mail) == ReasonCode.PENDING_EXPIRED
            reason, phase = Reason(code_of(mail), mail.detail), Phase.FAILED if expired else Phase.CANCELLED
            if await self._transition(phase, reason):
                return Ending(phase, reason)
            # Too late, an award is on its way: that attempt is cancelled, whichever number it has, or goes on in time.
            if not expired:
                self._mails.append(replace(mail, attempt=0))
            mail = await self._next_mail({MailKind.AWARDED})
        self._state.attempt = mail.attempt
        self._gang = None
        show_in_temporal(
            phase=Phase.PLACING.value,
            region=str(mail.detail.get("region", "")),
            rank=mail.detail.get("rank"),
            attempt=mail.attempt,
        )
        return await self._release(await self._placed(ready=bool(mail.detail.get("ready"))))

    async def _release(self, end: Ending) -> Ending:
        """Ends the attempt; how it did.

        One that is told to stop before this workflow has asked a machine for anything may run all the same: Temporal
        was rolled back to before its start, or an earlier workflow started it. Postgres knows; its tasks end first.
        """
        try:
            await self._try_release(end)
        except FailureError as error:
            if type_of(error) != TASKS_MAY_RUN:
                raise
            gang, plan = await self._gang_of_row()
            await gang.stop(plan.grace_s, lost=end.blames_machine)
            end = unless_completed(end, await gang.result(), plan)
            await self._try_release(end)
        return end

    async def _try_release(self, end: Ending) -> None:
        """Releases the attempt, with what is known of its machines at the moment of asking."""
        gang = self._gang
        silent = set() if gang is None else gang.silent.union(() if end.flushing_s is None else gang.still_running)
        await record(
            Activity.RELEASE,
            ReleaseRequest(
                workload_id=self._state.workload_id,
                attempt=self._state.attempt,
                next_phase=end.phase.value,
                reason=end.reason.to_json(),
                progress=list(end.progress),
                blames_machine=end.blames_machine,
                # Nothing is awaited after the gang's result: its runs, given up by then, would count as silence.
                silent_machines=sorted(silent),
                flushing_s=end.flushing_s or 0.0,
                unstarted=gang is None,
            ),
        )

    async def _placed(self, *, ready: bool) -> Ending:
        """An award's way to its end: slots, checkpoint, launch, run."""
        if not ready:
            mail = await self._next_mail({MailKind.SLOTS_READY, *STOPS})
            if mail.kind != MailKind.SLOTS_READY:
                return stopped_early(mail)
        stage = StageRequest(self._state.workload_id, self._state.attempt)
        plan = await self._unless_told(record(Activity.STAGE, stage, LaunchPlan))
        if isinstance(plan, Mail):
            return stopped_early(plan)
        if not plan.starts_at_once:
            show_in_temporal(region=plan.region)
        told = await self._unless_told(self._flushes.saved()) if self._flushes else None
        if told is not None:
            return stopped_early(told)
        if plan.checkpoint_region not in (None, plan.region):
            copied = await self._migrate(plan)
            if isinstance(copied, Mail):
                return stopped_early(copied)
        provisioning = Reason(ReasonCode.STARTING_TASKS, {"tasks": plan.tasks, "machines": len(plan.nodes)})
        if plan.starts_at_once:
            gang = self._gang = Gang(self._state.workload_id, self._state.attempt, plan)
            return await self._run(gang, plan, provisioning)
        await self._transition(Phase.PROVISIONING, provisioning)
        await record(Activity.STAGED_HERE, stage)
        gang = self._gang = Gang(self._state.workload_id, self._state.attempt, plan)
        failed = await self._unless_told(gang.prepare())
        # An earlier workflow may have started these tasks: they may run, or have ended.
        if isinstance(failed, Mail):
            await gang.stop(plan.grace_s, lost=lost_machine(failed))
            return unless_completed(stopped_early(failed), await gang.result(), plan)
        if gang.stopped_before:
            return await self._wind_up(gang, plan)
        if failed is not None:
            await gang.stop(plan.grace_s)
            end = await gang.result()
            if end.all_succeeded or end.failed:
                return self._verdicts.judge(end, plan, None)
            return await self._not_started(failed, end.progress)
        return await self._run(gang, plan)

    async def _not_started(self, failed: LaunchFailure, progress: tuple[TaskProgress, ...]) -> Ending:
        """What follows from a launch that failed: the workload has failed, or it is tried again.

        After the second failure in a row that is not at once: it would be placed there again within the second.
        """
        again = Ending(Phase.PENDING, failed.reason, progress, failed.blames_machine)
        self._state.refusals += 1
        if not failed.blames_workload and self._state.refusals == 1:
            return again
        if not workflow.patched(JUDGES_LAUNCHES):
            return again
        if failed.blames_workload:
            return Ending(Phase.FAILED, failed.reason, progress)
        told = await self._unless_told(asyncio.sleep(min(_LONGEST_PAUSE_S, 2.0 ** (self._state.refusals - 2))))
        return stopped_early(told) if isinstance(told, Mail) else again

    async def _migrate(self, plan: LaunchPlan) -> int | Mail:
        """Brings the checkpoint to the new region; its bytes, or the mail that interrupted it."""
        assert plan.checkpoint_region is not None
        detail = {"source": plan.checkpoint_region, "region": plan.region}
        await self._transition(Phase.MIGRATING, Reason(ReasonCode.COPYING_CHECKPOINT, detail))
        copy = CheckpointCopy(self._state.workload_id, self._state.attempt, plan.checkpoint_region, plan.region)
        return await self._unless_told(on_region(Activity.COPY_CHECKPOINT, copy, plan.region, start_to_close_s=_COPY_S))

    async def _unless_told(self, work: Coroutine[Any, Any, T]) -> T | Mail:
        """What `work` gives, or the mail that asks to stop before: then `work` is cancelled."""
        if self._has_mail(STOPS):
            work.close()
            return await self._next_mail(STOPS)
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or self._has_mail(STOPS))
        if task.done():
            return await task
        give_up(task)
        return await self._next_mail(STOPS)

    async def _run(self, gang: Gang, plan: LaunchPlan, provisioning: Reason | None = None) -> Ending:
        """Runs a gang to its end, or until it is told to stop. It is prepared, or begins with that (`provisioning`)."""
        started = workflow.time()
        gang.start()
        # Since when, the activity says.
        await self._transition(Phase.RUNNING, Reason(ReasonCode.RUNNING, {"region": plan.region}), provisioning)
        left_s = None if plan.max_runtime_s is None else max(0.0, plan.max_runtime_s - self._state.ran_s)
        try:
            await workflow.wait_condition(
                lambda: gang.ended or self._has_mail(STOPS),
                timeout=None if left_s is None else timedelta(seconds=left_s),
            )
            mail = None if gang.ended else await self._next_mail(STOPS)
            timed_out = False
        except TimeoutError:
            mail, timed_out = None, True
        if not timed_out and (leaving := self._leaving(gang, mail)) is not None:
            return await self._leave(gang, plan, leaving, started)
        if not gang.ended:
            ran_s = self._state.ran_s + workflow.time() - started
            await self._transition(Phase.CHECKPOINTING, why_stopped(mail, plan, ran_s))
            await gang.stop(plan.grace_s, lost=lost_machine(mail))
        end = await gang.result()
        self._state.ran_s += workflow.time() - started
        ending = self._verdicts.judge(end, plan, mail, timed_out)
        if end.refused is not None and ending.reason == end.refused.reason:
            return await self._not_started(end.refused, end.progress)
        self._state.refusals = 0
        return ending

    # ---------------------------------------------------------------------------------------------------------- leaving

    def _leaving(self, gang: Gang, mail: Mail | None) -> Reason | None:
        """Why a running gang goes back to the queue before its tasks have ended; None: it does not."""
        if not gang.still_running:
            return None
        if mail is None:
            return gang.noticed if gang.noticed is not None and minds_reports() else None
        # Whoever evicts it, or cancels it, waits for its tasks' end.
        if code_of(mail) != ReasonCode.PLATFORM_NOTICE or self._has_mail({MailKind.EVICT, MailKind.CANCEL}):
            return None
        return Reason(ReasonCode.PLATFORM_NOTICE, mail.detail)

    async def _leave(self, gang: Gang, plan: LaunchPlan, why: Reason, started: float) -> Ending:
        """The platform takes a machine: the workload is in the queue again while its tasks save their last checkpoint.

        The order in which that is right, whoever is slow or dies:

        1. The tasks are told to stop, and have their grace to save. Their machines take no other work until it is known
           that they have ended (`ReleaseRequest.silent_machines`), so what they hold is held by nobody else.
        2. Without waiting for them the attempt is released. The next one is awarded, evicts its victims and has its
           launch description written meanwhile: this is what takes long.
        3. The next attempt waits for the end of the tasks, or of their grace (`Flushes`), before it does anything that
           an older attempt would notice. Bringing the checkpoint to another region fences the source, and its tasks'
           first act is to claim the checkpoints: either would refuse the save that is under way, and lose its work.
        4. Then it claims. A task of the old attempt that runs on, because its machine was cut off, is refused from then
           on by the newer number, so what was loaded stays the newest.
        """
        await self._transition(Phase.CHECKPOINTING, why)
        self._state.hangs = 0
        self._flushes.begin(self._flush(gang, plan.grace_s, self._state.attempt, started), plan.grace_s)
        return Ending(Phase.PREEMPTED, why, flushing_s=plan.grace_s)

    async def _flush(self, gang: Gang, grace_s: float, attempt: int, started: float) -> None:
        """Stops a gang that was given up, and records what its tasks reported last."""
        await gang.stop(grace_s)
        end = await gang.result()
        self._state.ran_s += workflow.time() - started
        self._verdicts.count_loads(end)
        await record(Activity.FLUSHED, FlushedRequest(self._state.workload_id, attempt, list(end.progress)))

    # ------------------------------------------------------------------------------------------------------------- mail

    def _current(self, mail: Mail) -> bool:
        if mail.kind == MailKind.AWARDED:
            return mail.attempt > self._state.attempt
        return mail.attempt == self._state.attempt or self._is_about_any(mail)

    def _is_about_any(self, mail: Mail) -> bool:
        """Whether mail is about whichever attempt there is. An expiry names the attempt before the wait, maybe 0."""
        return mail.attempt == 0 and mail.detail.get("code") != ReasonCode.PENDING_EXPIRED.value

    def _has_mail(self, kinds: Set[MailKind]) -> bool:
        """Whether there is current mail of these kinds. Mail about earlier attempts is dropped on the way."""
        newer = [m for m in self._mails if m.attempt >= self._state.attempt or self._is_about_any(m)]
        if len(newer) < len(self._mails):
            self._mails = deque(newer)
        return any(m.kind in kinds and self._current(m) for m in self._mails)

    async def _next_mail(self, kinds: Set[MailKind]) -> Mail:
        """The oldest current mail of these kinds, a cancellation first; waits for one."""
        await workflow.wait_condition(lambda: self._has_mail(kinds))
        fitting = [m for m in self._mails if m.kind in kinds and self._current(m)]
        mail = next((m for m in fitting if m.kind == MailKind.CANCEL), fitting[0])
        self._mails.remove(mail)
        return mail

    async def _transition(self, phase: Phase, reason: Reason, provisioning: Reason | None = None) -> bool:
        show_in_temporal(phase=phase.value, reason=reason.code.value)
        before = None if provisioning is None else provisioning.to_json()
        request = TransitionRequest(self._state.workload_id, self._state.attempt, phase.value, reason.to_json(), before)
        return await record(Activity.TRANSITION, request, bool)

    # ------------------------------------------------------------------------------------------------ gone workflows

    async def _take_over(self) -> Ending | None:
        """This workflow replaces one that is gone while an attempt was placed: it brings that attempt to its end.

        Every effect on the way from the award to running tasks is idempotent, and agents re-attach to tasks that run or
        have ended. So the successor does all of it again, and nothing that runs is stopped. Where the tasks were told
        to stop, or where an effect is refused for good, it stops what is left instead (`_wind_up`).
        """
        taken_over = self._state.takes_over or workflow.patched(TAKES_OVER)
        end: Ending | None = None
        if taken_over and not self._state.stopping:
            try:
                end = await self._placed(ready=self._state.ready)
            except FailureError as error:
                workflow.logger.warning("attempt %d cannot be taken over: %s", self._state.attempt, error)
        if end is None:
            end = await self._wind_up(*await self._gang_of_row())
        end = await self._release(end)
        self._state.placed = False
        return end if taken_over or end.phase in TERMINAL_PHASES else None

    async def _gang_of_row(self) -> tuple[Gang, LaunchPlan]:
        """The present attempt's gang by what Postgres says of it, whether or not this workflow has started it."""
        where = StageRequest(self._state.workload_id, self._state.attempt, winds_up=True)
        plan = await record(Activity.STAGE, where, LaunchPlan)
        self._gang = Gang(self._state.workload_id, self._state.attempt, plan)
        return self._gang, plan

    async def _wind_up(self, gang: Gang, plan: LaunchPlan) -> Ending:
        """Stops what is left of an attempt. Tasks that had all ended by themselves count as usual."""
        await gang.stop(plan.grace_s)
        end = await gang.result()
        mail = await self._next_mail({MailKind.CANCEL}) if self._has_mail({MailKind.CANCEL}) else None
        if mail is not None or end.all_succeeded or end.failed:
            return self._verdicts.judge(end, plan, mail)
        return Ending(Phase.PREEMPTED, Reason(ReasonCode.STACK_STOPPED), end.progress)
