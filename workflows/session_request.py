"""Asks the agent of a task's machine to join a session. The session itself does not depend on the workflow."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol.activities import Activity
    from domain.protocol.sessions import OpenSession, SessionRefusal
    from workflows.activity_calls import record

_ANSWER_S = 20.0
"""How long the agent may take to get the request, and then to connect."""
_ONCE = RetryPolicy(maximum_attempts=1)


@workflow.defn(name="SessionWorkflow")
class SessionWorkflow:
    """One request to an agent. It is not repeated: the user sees why it failed."""

    @workflow.run
    async def run(self, request: OpenSession) -> None:
        """Asks the agent once; if it does not join, records why."""
        try:
            await workflow.execute_activity(
                Activity.OPEN_SESSION.value,
                request,
                task_queue=ids.agent_queue(request.machine),
                schedule_to_start_timeout=timedelta(seconds=_ANSWER_S),
                start_to_close_timeout=timedelta(seconds=_ANSWER_S),
                retry_policy=_ONCE,
            )
        except ActivityError as error:
            await record(Activity.REFUSE_SESSION, SessionRefusal(request.session, _why(request.machine, error)))


def _why(machine: str, error: ActivityError) -> str:
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return cause.message
    if isinstance(cause, TimeoutError):
        return f"the agent of {machine} has not answered within {_ANSWER_S:g} s: it is stopped or not connected"
    return f"the agent of {machine} could not be asked: {cause or error}"
