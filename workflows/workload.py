"""The lifecycle of one workload: waits for an award, runs the attempt to its end, releases it, and repeats."""

from dataclasses import replace

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from domain.lifecycle.attempts import FIRST, Step
    from domain.lifecycle.endings import Ending, code_of, final, stopped_early, unless_completed
    from domain.lifecycle.retry_limits import PREEMPTIONS, limit_reached
    from domain.phases import TERMINAL_PHASES, Phase
    from domain.protocol.activities import Activity
    from domain.protocol.workload_messages import MessageKind, WorkloadMessage
    from domain.protocol.workloads import TASKS_MAY_RUN, ReleaseRequest, WorkloadInput
    from domain.reasons import ReasonCode
    from workflows.activity_calls import free_memory, record, show_in_temporal, type_of
    from workflows.attempt import AttemptRun, transition
    from workflows.flushes import PendingSaves
    from workflows.inbox import Inbox
    from workflows.verdicts import Verdicts

LONG_HISTORY_EVENTS = 2000
"""The workflow continues as new between two attempts once its history has this many events."""


@workflow.defn(name="WorkloadWorkflow")
class WorkloadWorkflow:
    """The workflow of one workload, from its first award to its end. Its signal `mail` receives all messages."""

    @workflow.init
    def __init__(self, state: WorkloadInput) -> None:
        # Runs before the first signal, so that a message which an earlier run received is dropped as a duplicate.
        self._state = state
        self._inbox = Inbox(state)
        self._flushes = PendingSaves()
        self._verdicts = Verdicts(state)

    @workflow.signal
    def mail(self, message: WorkloadMessage) -> None:
        """Receives a message from the outbox. Duplicates are dropped."""
        self._inbox.put(message)

    @workflow.run
    async def run(self, state: WorkloadInput) -> str:
        """Runs the workload to its end; returns its final phase."""
        taken_over = await self._take_over() if state.placed else None
        while True:
            end, taken_over = taken_over or await self._one_attempt(), None
            show_in_temporal(phase=end.phase.value, reason=end.reason.code.value)
            if end.phase in TERMINAL_PHASES:
                await self._flushes.ended()
                await free_memory(self._state.held_on, self._state.workload_id, self._state.attempt)
                await workflow.wait_condition(workflow.all_handlers_finished)
                return end.phase.value
            info = workflow.info()
            if info.is_continue_as_new_suggested() or info.get_current_history_length() > LONG_HISTORY_EVENTS:
                await self._flushes.ended()
                await workflow.wait_condition(workflow.all_handlers_finished)
                self._state.placed = False
                self._inbox.save()
                workflow.continue_as_new(self._state)

    async def _one_attempt(self) -> Ending:
        """Waits for an award and runs its attempt; returns how it ended. A message of another kind may end the wait."""
        message = await self._inbox.next({MessageKind.AWARDED, MessageKind.CANCEL, MessageKind.FINISHED})
        if message.kind != MessageKind.AWARDED:
            expired, end = code_of(message) == ReasonCode.PENDING_EXPIRED, stopped_early(message)
            end = replace(end, phase=Phase.FAILED) if expired else end
            if await transition(self._state, end.phase, end.reason):
                return end
            # A newer attempt has been awarded. The message applies to that attempt; an expiry is void.
            if not expired:
                self._inbox.put_for_any(message)
            message = await self._inbox.next({MessageKind.AWARDED})
        self._state.attempt = message.attempt
        show_in_temporal(
            phase=Phase.PLACING.value,
            region=str(message.detail.get("region", "")),
            rank=message.detail.get("rank"),
            attempt=message.attempt,
        )
        attempt = self._attempt(ready=bool(message.detail.get("ready")))
        return await self._release(attempt, await attempt.follow(FIRST))

    def _attempt(self, *, ready: bool) -> AttemptRun:
        return AttemptRun(self._state, self._inbox, self._flushes, self._verdicts, ready=ready)

    async def _release(self, attempt: AttemptRun, end: Ending) -> Ending:
        """Releases the attempt; returns how it ended.

        Tasks may run even if this workflow has not sent a request to any machine: an earlier workflow started them, or
        Temporal was rolled back to before their start. In that case Postgres refuses the release, and the tasks are
        stopped first.
        """
        end = self._final(end)
        try:
            await self._try_release(attempt, end)
        except FailureError as error:
            if type_of(error) != TASKS_MAY_RUN:
                raise
            gang, plan = await attempt.find()
            await gang.stop(plan.grace_s, lost=end.blames_machine)
            await attempt.settle()
            end = self._final(unless_completed(end, await gang.result(), plan))
            await self._try_release(attempt, end)
        self._state.held_on = attempt.held_on(end)
        self._state.preemptions += end.reason.code in PREEMPTIONS
        self._state.losses += end.reason.code == ReasonCode.MACHINE_LOST
        return end

    def _final(self, end: Ending) -> Ending:
        """Returns the ending, turned into a failure if the workload is not queued again after it."""
        if self._state.one_attempt:
            return final(end)
        reason = None if end.phase in TERMINAL_PHASES else limit_reached(end.reason, self._state)
        return end if reason is None else replace(end, phase=Phase.FAILED, reason=reason)

    async def _try_release(self, attempt: AttemptRun, end: Ending) -> None:
        """Releases the attempt, and reports the machines on which its tasks may still run."""
        gang = attempt.gang
        silent = set() if gang is None else gang.silent.union(() if end.flushing_s is None else gang.still_running)
        await record(
            Activity.RELEASE,
            ReleaseRequest(
                workload_id=self._state.workload_id,
                attempt=self._state.attempt,
                next_phase=end.phase.value,
                reason=end.reason.to_json(),
                progress=list(end.progress),
                elements=attempt.elements,
                blames_machine=end.blames_machine,
                # Do not await between the gang's result and this line: cancelled runs would count as machines that did
                # not answer.
                silent_machines=sorted(silent),
                flushing_s=end.flushing_s or 0.0,
                unstarted=gang is None,
            ),
        )

    async def _take_over(self) -> Ending:
        """Runs the placed attempt of a lost workflow to its end, and returns how it ended.

        Every activity from the award to the running tasks is idempotent, and agents re-attach to tasks that run or have
        ended. So this workflow repeats all steps, and no running task is stopped. If the tasks were already asked to
        stop, or an activity fails permanently, it stops the remaining tasks instead.
        """
        attempt = self._attempt(ready=self._state.ready)
        end: Ending | None = None
        if not self._state.stopping:
            try:
                end = await attempt.follow(FIRST)
            except FailureError as error:
                workflow.logger.warning("attempt %d cannot be taken over: %s; stopping it", self._state.attempt, error)
        if end is None:
            await attempt.find()
            end = await attempt.follow(Step.WIND_UP)
        end = await self._release(attempt, end)
        self._state.placed = False
        return end
