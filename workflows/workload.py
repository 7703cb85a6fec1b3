"""The life of one workload: waits for an award, brings the attempt to its end, releases it, and again."""

from temporalio import workflow
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from domain.phases import TERMINAL_PHASES, Phase
    from domain.protocol import TASKS_MAY_RUN, Activity, Mail, MailKind, ReleaseRequest, WorkloadInput
    from domain.reasons import Reason, ReasonCode
    from lifecycle.attempts import FIRST, Step
    from lifecycle.endings import Ending, code_of, unless_completed
    from workflows.attempt import Attempt, transition
    from workflows.effects import record, show_in_temporal, type_of
    from workflows.flushes import Flushes
    from workflows.mailbox import Mailbox
    from workflows.verdicts import Verdicts

TAKES_OVER = "takes-over-attempts"
"""Patch: a workflow that replaces one that is gone goes on with the attempt, instead of stopping its tasks."""
LONG_HISTORY_EVENTS = 2000
"""A history of this length is continued in a new one, between two attempts."""


@workflow.defn(name="WorkloadWorkflow")
class WorkloadWorkflow:
    """One for each workload, from its first award to its end. All news come as `mail`."""

    @workflow.init
    def __init__(self, state: WorkloadInput) -> None:
        # Before the first signal: what an earlier run has seen is a repetition for this one, too.
        self._state = state
        self._mailbox = Mailbox(state)
        self._flushes = Flushes()
        self._verdicts = Verdicts(state)

    @workflow.signal
    def mail(self, mail: Mail) -> None:
        """Takes a message from the outbox; a repetition is dropped."""
        self._mailbox.put(mail)

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
                self._mailbox.save()
                workflow.continue_as_new(self._state)

    async def _one_attempt(self) -> Ending:
        """From the queue to the queue or the end."""
        mail = await self._mailbox.next({MailKind.AWARDED, MailKind.CANCEL})
        if mail.kind == MailKind.CANCEL:
            expired = code_of(mail) == ReasonCode.PENDING_EXPIRED
            reason, phase = Reason(code_of(mail), mail.detail), Phase.FAILED if expired else Phase.CANCELLED
            if await transition(self._state, phase, reason):
                return Ending(phase, reason)
            # Too late, an award is on its way: that attempt is cancelled, whichever number it has, or goes on in time.
            if not expired:
                self._mailbox.put_for_any(mail)
            mail = await self._mailbox.next({MailKind.AWARDED})
        self._state.attempt = mail.attempt
        show_in_temporal(
            phase=Phase.PLACING.value,
            region=str(mail.detail.get("region", "")),
            rank=mail.detail.get("rank"),
            attempt=mail.attempt,
        )
        attempt = self._attempt(ready=bool(mail.detail.get("ready")))
        return await self._release(attempt, await attempt.follow(FIRST))

    def _attempt(self, *, ready: bool) -> Attempt:
        return Attempt(self._state, self._mailbox, self._flushes, self._verdicts, ready=ready)

    async def _release(self, attempt: Attempt, end: Ending) -> Ending:
        """Ends the attempt; how it did.

        One that is told to stop before this workflow has asked a machine for anything may run all the same: Temporal
        was rolled back to before its start, or an earlier workflow started it. Postgres knows; its tasks end first.
        """
        try:
            await self._try_release(attempt, end)
        except FailureError as error:
            if type_of(error) != TASKS_MAY_RUN:
                raise
            gang, plan = await attempt.find()
            await gang.stop(plan.grace_s, lost=end.blames_machine)
            end = unless_completed(end, await gang.result(), plan)
            await self._try_release(attempt, end)
        return end

    async def _try_release(self, attempt: Attempt, end: Ending) -> None:
        """Releases the attempt, with what is known of its machines at the moment of asking."""
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
                blames_machine=end.blames_machine,
                # Nothing is awaited after the gang's result: its runs, given up by then, would count as silence.
                silent_machines=sorted(silent),
                flushing_s=end.flushing_s or 0.0,
                unstarted=gang is None,
            ),
        )

    async def _take_over(self) -> Ending | None:
        """This workflow replaces one that is gone while an attempt was placed: it brings that attempt to its end.

        Every effect on the way from the award to running tasks is idempotent, and agents re-attach to tasks that run or
        have ended. So the successor does all of it again, and nothing that runs is stopped. Where the tasks were told
        to stop, or where an effect is refused for good, it stops what is left instead.
        """
        taken_over = self._state.takes_over or workflow.patched(TAKES_OVER)
        attempt = self._attempt(ready=self._state.ready)
        end: Ending | None = None
        if taken_over and not self._state.stopping:
            try:
                end = await attempt.follow(FIRST)
            except FailureError as error:
                workflow.logger.warning("attempt %d cannot be taken over: %s", self._state.attempt, error)
        if end is None:
            await attempt.find()
            end = await attempt.follow(Step.WIND_UP)
        end = await self._release(attempt, end)
        self._state.placed = False
        return end if taken_over or end.phase in TERMINAL_PHASES else None
