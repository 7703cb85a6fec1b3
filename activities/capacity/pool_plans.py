"""The loop that plans which machines of a region belong to which pool (`ras`), and that carries plans out."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, delete, func, select

from activities.capacity.pool_moves import carry_out, release_unplanned
from activities.capacity.pool_supply import count_machines, read_machines
from activities.leader import Leader, lead
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import PoolRow
from infra.db.pool_plans import PoolPlan
from infra.db.session import in_thread, transaction
from ras.intents import Intent
from ras.supply import PooledMachine, aggregate

if TYPE_CHECKING:
    from ras.plan import RegionPlan

_CHECK_S = 10.0
"""Interval at which sizes and machines are compared with those of the newest plan."""
_SHARE = 0.1
"""The largest fraction of time that rounds take: a program without a plan keeps the solver busy for minutes."""
MOST_MOVES = 1000
"""Maximum number of moves that a plan lists. When they are carried out, the next plan is made."""


class PoolPlanner:
    """Makes the plans of all regions with intended sizes. One process of an installation runs it."""

    def __init__(self, engine: Engine, settings: CapacitySettings) -> None:
        self._engine = engine
        self._settings = settings

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        interval_s = min(_CHECK_S, self._settings.plan_interval_s)
        planning = Leader.PLANNING_POOLS
        await lead(self._engine, planning, "planning pools", lambda: in_thread(self.round), interval_s, _SHARE)

    def round(self) -> list[str]:
        """Makes the plans that are due, and carries plans out; returns the errors of regions without a plan.

        Blocks. The solver runs without a transaction.
        """
        failures = []
        for region, intents in self._intents().items():
            try:
                count = self._plan(region, intents)
                self._move(region, count)
            except Exception as error:
                failures.append(f"region {region}: {error}")
        return failures

    def _plan(self, region: str, intents: Sequence[Intent]) -> int:
        """Makes the plan of a region if it is due; returns the number of machines that plans may use."""
        pools, patience_s = {one.pool for one in intents}, self._settings.pool_patience_s
        with transaction(self._engine) as session:
            counts = count_machines(session, region, pools, patience_s)
            newest = session.get(PoolPlan, region)
            age_s = func.extract("epoch", func.now() - PoolPlan.made_at)
            old_s = session.scalar(select(age_s).where(PoolPlan.region == region))
            has = newest.inputs if newest is not None else None
        inputs = _digest(intents, counts)
        if has != inputs or old_s is None or float(old_s) >= self._settings.plan_interval_s:
            with transaction(self._engine) as session:
                machines = read_machines(session, region, pools, patience_s)
            self._make(region, intents, machines, inputs)
        return sum(row[-1] for row in counts)

    def _move(self, region: str, machines: int) -> None:
        """Continues to carry out the newest plan. If nothing is left of its list, another plan is made."""
        if not self._settings.move_machines:
            return
        at_most = max(1, int(machines * self._settings.moving_share))
        with transaction(self._engine) as session:
            plan = session.get_one(PoolPlan, region, with_for_update=True)
            moves = plan.body["moves"]
            left = carry_out(session, region, moves, at_most, self._settings.pool_patience_s)
            if not left.moving and not left.waiting and (left.void or plan.body["move_count"] > len(moves)):
                plan.inputs = ""

    def _intents(self) -> dict[str, list[Intent]]:
        """Returns the intents by region. Deletes the plans of regions that have none, and releases their machines."""
        with transaction(self._engine) as session:
            out: dict[str, list[Intent]] = {}
            wanted = select(PoolRow).where(PoolRow.gpus != {}).order_by(PoolRow.region, PoolRow.name)
            for row in session.scalars(wanted):
                intent = Intent(
                    row.name, dict(row.gpus), row.failure_buffer, row.survives_loss, row.max_share,
                    frozenset(row.kinds), row.max_usd_per_h,
                )  # fmt: skip
                out.setdefault(row.region, []).append(intent)
            session.execute(delete(PoolPlan).where(PoolPlan.region.not_in(out)))
            release_unplanned(session)
            return out

    def _make(self, region: str, intents: Sequence[Intent], machines: Sequence[PooledMachine], inputs: str) -> None:
        # Imported late: the solver and matplotlib take a second and 100 MB, and most installations have no sizes.
        from activities.capacity.pool_plan_picture import draw
        from ras import moves, solve, surplus

        supply = aggregate(machines)
        plan = surplus.without_surplus(solve.plan(supply, intents), intents)
        changes = moves.choose(plan, machines, supply)
        body = {
            "pools": _outcomes(plan, machines),
            "moves": [asdict(move) for move in sorted(changes.moves, key=lambda move: move.busy)[:MOST_MOVES]],
            "move_count": len(changes.moves),
            "busy_move_count": sum(move.busy for move in changes.moves),
        }
        with transaction(self._engine) as session:
            session.merge(PoolPlan(region=region, inputs=inputs, body=body, svg=draw(region, plan), made_at=func.now()))


def _digest(intents: Sequence[Intent], counts: list[list[Any]]) -> str:
    """Returns a digest of sizes and machines. Which machines are in use changes too often, and is left out."""
    wanted = [(*sorted(one.sizes.items()), one.pool, one.failure_buffer, one.survives_loss, one.max_share,
               sorted(one.kinds), one.max_usd_per_h) for one in intents]  # fmt: skip
    return hashlib.sha256(json.dumps([wanted, counts]).encode()).hexdigest()


def _outcomes(plan: "RegionPlan", machines: Sequence[PooledMachine]) -> list[Mapping[str, Any]]:
    now = Counter[tuple[str, str]]()
    for machine in machines:
        now[machine.pool, machine.type.resource] += machine.type.units
    return [
        {
            "pool": one.pool,
            "gpu_type": one.resource,
            "size": one.size,
            "needed": one.needed,
            "now": now[one.pool, one.resource],
            "planned": one.total,
            "after_loss": one.after_loss,
            "short": one.short,
        }
        for one in plan.outcomes
    ]
