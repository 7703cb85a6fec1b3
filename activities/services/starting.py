"""Starts a service's workflow."""

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from domain import ids
from domain.protocol import ServiceRef


async def start_service(client: Client, service: str) -> None:
    """Starts the workflow, or signals the running one to decide again. A service that has ended ends it at once."""
    await client.start_workflow(
        "ServiceWorkflow",
        ServiceRef(service),
        id=ids.service_workflow_id(service),
        task_queue=ids.CONTROL_QUEUE,
        start_signal="look",
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        static_summary="keeps the replicas of a service",
    )
