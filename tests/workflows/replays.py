"""Replays histories on the current workflow code."""

from collections.abc import Mapping
from pathlib import Path

from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from infra.payloads import DATA_CONVERTER
from workflows.bundle import BundleWorkflow
from workflows.housekeeping import HousekeepingWorkflow
from workflows.instance import InstanceWorkflow
from workflows.machine import MachineWorkflow
from workflows.replica import ReplicaWorkflow
from workflows.scheduler import DryRunWorkflow, SchedulerWorkflow
from workflows.scrub import ScrubWorkflow
from workflows.session_request import SessionWorkflow
from workflows.workload import WorkloadWorkflow

HISTORIES = Path(__file__).parent / "histories"

WORKFLOWS: Mapping[str, type] = {
    workflow.__name__: workflow
    for workflow in (
        WorkloadWorkflow, SchedulerWorkflow, DryRunWorkflow, MachineWorkflow, HousekeepingWorkflow, ReplicaWorkflow,
        ScrubWorkflow, InstanceWorkflow, SessionWorkflow, BundleWorkflow,
    )
}  # fmt: skip


async def replay(history: WorkflowHistory, changed: type | None = None) -> None:
    """Replays a history on its current workflow class, or on `changed`, in the sandbox with the production converter.

    Raises:
        NondeterminismError: the workflow's commands differ from the history.
    """
    began = history.events[0].workflow_execution_started_event_attributes
    workflow = changed or WORKFLOWS[began.workflow_type.name]
    # Only this workflow, because a replayer imports every workflow that it gets.
    await Replayer(workflows=[workflow], data_converter=DATA_CONVERTER).replay_workflow(history)
