"""The loop that plans pools: which machines it uses, when it makes a plan, and what it publishes."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from activities.capacity.pool_plans import PoolPlanner
from domain.reasons import Reason, ReasonCode
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import PoolRow
from infra.db.models import Cluster, Machine
from infra.db.pool_plans import PoolPlan
from tests.activities.world import World, job


@pytest.fixture
def fleet(database: Engine, tmp_path: Path) -> World:
    """Six machines of 4 GPUs in three zones; pool p wants 8 GPUs that survive the loss of a zone."""
    world = World(database, tmp_path)
    world.tenant()
    world.region("north")
    for zone in "abc":
        for number in (1, 2):
            world.machine(f"north/{zone}/m{number}")
    with world.session() as session:
        session.add(PoolRow(region="north", name="p", gpus={"a100": 8}))
        for cluster in session.scalars(select(Cluster)):
            cluster.zone = f"zone-{cluster.name}"
    return world


def _plan(world: World, planner: PoolPlanner) -> tuple[Any, dict[str, Any]]:
    assert planner.round() == []
    with world.session() as session:
        row = session.get_one(PoolPlan, "north")
        return row.made_at, row.body


def _set(world: World, **columns: Any) -> None:
    with world.session() as session:
        row = session.get_one(PoolRow, ("north", "p"))
        for name, value in columns.items():
            setattr(row, name, value)


def test_a_plan_is_made_when_sizes_or_machines_change(fleet: World) -> None:
    """Without a change the plan stays; after a change of the size, or a cordon, there is another."""
    planner = PoolPlanner(fleet.engine, CapacitySettings())
    first, body = _plan(fleet, planner)
    [pool] = body["pools"]
    assert (pool["needed"], pool["now"], pool["planned"], pool["after_loss"], pool["short"]) == (8, 0, 12, 8, 0)
    assert {move["machine"].split("/")[1] for move in body["moves"]} == {"a", "b", "c"}
    assert body["move_count"] == 3
    assert _plan(fleet, planner)[0] == first
    _set(fleet, gpus={"a100": 20})
    second, body = _plan(fleet, planner)
    assert second > first
    assert body["pools"][0]["short"] == 4
    with fleet.session() as session:
        machine = session.get_one(Machine, "north/a/m1")
        machine.cordon = Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": "x"}).to_json()
    _, body = _plan(fleet, planner)
    assert body["pools"][0]["short"] == 8


def test_a_plan_is_made_again_after_the_interval(fleet: World) -> None:
    """Without a change, too."""
    planner = PoolPlanner(fleet.engine, CapacitySettings(plan_interval_s=1e-6))
    assert _plan(fleet, planner)[0] < _plan(fleet, planner)[0]


def test_idle_machines_are_planned_before_those_in_use(fleet: World) -> None:
    """A pool that needs half of each zone gets the machines without work."""
    fleet.running(job(gpus=4))
    _, body = _plan(fleet, PoolPlanner(fleet.engine, CapacitySettings()))
    assert body["busy_move_count"] == 0


def test_rules_of_a_pool_have_an_effect(fleet: World) -> None:
    """Each setting changes the plan: buffer, loss, share, capacity kind and price."""
    planner = PoolPlanner(fleet.engine, CapacitySettings(move_machines=False))

    def planned(**columns: Any) -> tuple[int, int]:
        _set(fleet, **columns)
        [pool] = _plan(fleet, planner)[1]["pools"]
        return pool["planned"], pool["short"]

    assert planned(survives_loss=False) == (8, 0)
    assert planned(failure_buffer=0.5) == (12, 0)
    assert planned(max_share=0.34) == (12, 0)
    assert planned(max_share=0.2) == (12, 6)  # At most 2 GPUs of each of three zones count.
    assert planned(max_share=1.0, kinds=["spot"]) == (0, 12)
    with fleet.session() as session:
        for cluster in session.scalars(select(Cluster)):
            cluster.prices = {"a100": 2.0 if cluster.name == "a" else 3.0}
    assert planned(kinds=[], max_usd_per_h=8.0) == (8, 4)  # A machine costs 8 dollars in zone a, and 12 elsewhere.


def test_plans_of_regions_without_sizes_are_deleted(fleet: World) -> None:
    """The plan goes with the last size."""
    planner = PoolPlanner(fleet.engine, CapacitySettings())
    _plan(fleet, planner)
    _set(fleet, gpus={})
    assert planner.round() == []
    with fleet.session() as session:
        assert session.get(PoolPlan, "north") is None
