"""Replaying histories against the workflows as they are now."""

from collections.abc import Sequence
from pathlib import Path

from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workflows.house import HousekeepingWorkflow
from workflows.machine import MachineWorkflow
from workflows.replica import ReplicaWorkflow
from workflows.scheduler import DryRunWorkflow, SchedulerWorkflow
from workflows.workload import WorkloadWorkflow

HISTORIES = Path(__file__).parent / "histories"

WORKFLOWS: Sequence[type] = (
    WorkloadWorkflow, SchedulerWorkflow, DryRunWorkflow, MachineWorkflow, HousekeepingWorkflow, ReplicaWorkflow
)  # fmt: skip


def replayer(workflows: Sequence[type] = WORKFLOWS) -> Replayer:
    """Replays in the sandbox, with the converter that the live system uses."""
    return Replayer(workflows=workflows, data_converter=pydantic_data_converter)
