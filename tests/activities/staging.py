"""Staging of a launch by the activity."""

from domain.launch import LaunchDescription
from domain.protocol.workloads import LaunchPlan, StageRequest
from tests.activities.world import World


def stage_launch(world: World, workload: str, attempt: int = 1) -> tuple[LaunchPlan, LaunchDescription]:
    """Stages an attempt; returns the plan and the launch description in the bucket."""
    plan = world.launch.stage(StageRequest(workload, attempt))
    return plan, LaunchDescription.model_validate_json(world.bucket(plan.region).get(plan.launch_key))
