"""Starts an instance's workflow with its state from the ledger."""

from sqlalchemy.orm import Session
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from domain import ids
from domain.protocol import InstanceInput
from infra.config import CapacitySettings
from infra.db.capacity import InstanceRow
from lifecycle.instances import LATEST_INSTANCES


def read_instance(session: Session, instance: str, settings: CapacitySettings) -> InstanceInput | None:
    """Returns the input with which an instance's workflow starts now; None: the instance is gone or does not exist."""
    row = session.get(InstanceRow, instance)
    if row is None or row.gone_at is not None:
        return None
    return InstanceInput(row.id, row.phase, LATEST_INSTANCES, settings.join_s, settings.drain_s)


async def start_instance(client: Client, start: InstanceInput) -> None:
    """Starts the workflow, or signals the running one to read the ledger."""
    await client.start_workflow(
        "InstanceWorkflow",
        start,
        id=ids.instance_workflow_id(start.instance),
        task_queue=ids.CONTROL_QUEUE,
        start_signal="look",
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        static_summary=f"machine of a pool, {start.instance}",
    )
