"""Workers: every activity has exactly one queue, and invalid arguments are refused."""

from typing import Any, cast

import pytest
from temporalio.client import Client

from activities.roles import control_activities, region_activities, run_worker
from domain.protocol.activities import Activity
from infra.config.settings import Settings
from infra.errors import ConfigurationError
from tests.activities.world import World

ON_AGENTS = {
    Activity.PREPARE_NODE,
    Activity.RUN_NODE,
    Activity.STOP_NODE,
    Activity.ATTEND,
    Activity.PACE_NODE,
    Activity.PROVE_KEY,
    Activity.OPEN_SESSION,
    Activity.RUN_ELEMENTS,
    Activity.RUN_BUNDLE,
    Activity.CANCEL_ELEMENTS,
}


def _names(activities: list[Any]) -> list[str]:
    return [method.__temporal_activity_definition.name for method in activities]


def test_every_activity_runs_somewhere(world: World) -> None:
    """The control and region queues together serve each activity that is not an agent's exactly once."""
    control = _names(control_activities(world.engine, world.settings, cast(Client, None)))
    region = _names(region_activities(world.engine, world.settings, world.scheduler_state))
    assert sorted(control + region) == sorted(a.value for a in Activity if a not in ON_AGENTS)
    assert {Activity.BID, Activity.COPY_CHECKPOINT, Activity.COPY_TABLE, Activity.SCRUB} == set(region)


@pytest.mark.parametrize(
    ("roles", "regions", "database", "message"),
    [
        ([], [], "postgresql://x/y", "role: none given; must be control, region or both"),
        (["boss", "control"], [], "postgresql://x/y", "role: boss given"),
        (["region"], [], "postgresql://x/y", "needs at least one --region"),
        (["control"], [], None, "database: not set"),
    ],
)
async def test_a_worker_that_cannot_be(
    roles: list[str], regions: list[str], database: str | None, message: str
) -> None:
    """A worker without a valid role, a region or a database does not start, and the error names what is missing."""
    with pytest.raises(ConfigurationError, match=message):
        await run_worker(Settings(database=database), roles, regions)
