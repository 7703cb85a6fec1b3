"""Starts an instance's workflow with its state from the ledger."""

from sqlalchemy.orm import Session
from temporalio.client import Client

from activities.workflow_start import ensure_workflow
from domain import ids
from domain.lifecycle.instances import LATEST_INSTANCES
from domain.protocol.instances import InstanceInput
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import InstanceRow


def read_instance(session: Session, instance: str, settings: CapacitySettings) -> InstanceInput | None:
    """Returns the input with which an instance's workflow starts now; None: the instance is gone or does not exist."""
    row = session.get(InstanceRow, instance)
    if row is None or row.gone_at is not None:
        return None
    return InstanceInput(row.id, row.phase, LATEST_INSTANCES, settings.join_s, settings.drain_s)


async def start_instance(client: Client, start: InstanceInput) -> None:
    """Starts the workflow, or signals the running one to read the ledger."""
    await ensure_workflow(
        client,
        "InstanceWorkflow",
        ids.instance_workflow_id(start.instance),
        start,
        signal="refresh",
        summary=f"machine of a pool, {start.instance}",
    )
