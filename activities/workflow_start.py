"""Starts workflows of which at most one run is open at a time."""

from typing import Any

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from domain import ids


async def ensure_workflow(
    client: Client, workflow: str, id_: str, *arguments: Any, signal: str | None = None, summary: str | None = None
) -> None:
    """Starts a workflow on the control queue unless it runs; a run that has ended is followed by a new one.

    Args:
        client: the client of Temporal.
        workflow: the name of the workflow's type.
        id_: the workflow's id.
        arguments: the workflow's input if it is started.
        signal: the name of a signal that the workflow gets, whether it already runs or is started.
        summary: the text about the workflow in Temporal's UI.
    """
    await client.start_workflow(
        workflow,
        args=arguments,
        id=id_,
        task_queue=ids.CONTROL_QUEUE,
        start_signal=signal,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        static_summary=summary,
    )
