"""The endpoint for the newest plan of a region's pools."""

from datetime import datetime

from pydantic import Field

from api.auth import Operator
from api.openapi import refusals
from api.problems import existing, not_found
from api.routing import Router
from api.state import StateOf
from api.views import View
from infra.db.models import Region
from infra.db.pool_plans import PoolPlan

router = Router(prefix="/v1/regions", tags=["fleet"])


class PlannedPoolView(View):
    """What a plan gives one pool, in GPUs of one type."""

    pool: str
    gpu_type: str
    size: int = Field(description="The intended number of GPUs")
    needed: int = Field(description="Size and buffer for failures of single machines")
    now: int = Field(description="GPUs that the pool had when the plan was made")
    planned: int = Field(description="GPUs that it would have")
    after_loss: int = Field(
        description="GPUs that would count after the loss of the fault domain with most of its GPUs, if it must survive"
    )
    short: int = Field(description="GPUs that it would lack of what is needed")


class PlannedMoveView(View):
    """A machine that changes its pool."""

    machine: str
    source: str = Field(description="Its pool when the plan was made; empty: none")
    target: str = Field(description="Its pool under the plan; empty: none")
    busy: bool = Field(description="Whether a workload held resources of it when the plan was made")


class PoolPlanView(View):
    """The newest plan of the pools of a region. Its moves are carried out, some at a time."""

    region: str
    made_at: datetime
    pools: list[PlannedPoolView] = Field(description="Sorted by GPU type and pool")
    moves: list[PlannedMoveView] = Field(description="At most 1000 moves")
    move_count: int
    busy_move_count: int = Field(description="Moves of machines in use")
    svg: str = Field(description="Picture of the plan, as an SVG element")


@router.get("/{name}/pool-plan", summary="Get the plan of a region's pools", responses=refusals(404))
def get_pool_plan(name: str, state: StateOf, _: Operator) -> PoolPlanView:
    """Returns the newest plan. A new plan is made every 30 minutes, and after each change of sizes or machines."""
    with state.transaction() as session:
        existing(session, Region, name, "region")
        row = session.get(PoolPlan, name)
        if row is None:
            raise not_found("pool plan", name)
        return PoolPlanView.model_validate({"region": name, "made_at": row.made_at, "svg": row.svg, **row.body})
