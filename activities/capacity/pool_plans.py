"""The loop that plans which machines of a region belong to which pool (`ras`). It only publishes plans."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.orm import Session

from activities.leader import Leader, lead
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.models import Allocation, Cluster
from infra.db.models import Machine as MachineRow
from infra.db.pool_plans import PoolPlan
from infra.db.session import in_thread, transaction
from ras.intents import Intent
from ras.supply import NO_POOL, PooledMachine, PooledType, aggregate

if TYPE_CHECKING:
    from ras.plan import RegionPlan

_CHECK_S = 10.0
"""Interval at which sizes and machines are compared with those of the newest plan."""
_SHARE = 0.1
"""The largest fraction of time that rounds take: a program without a plan keeps the solver busy for minutes."""
MOST_MOVES = 1000
"""Maximum number of moves that a published plan lists."""


class PoolPlanner:
    """Makes the plans of all regions with intended sizes. One process of an installation runs it."""

    def __init__(self, engine: Engine, settings: CapacitySettings) -> None:
        self._engine = engine
        self._interval_s = settings.plan_interval_s

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        interval_s = min(_CHECK_S, self._interval_s)
        planning = Leader.PLANNING_POOLS
        await lead(self._engine, planning, "planning pools", lambda: in_thread(self.round), interval_s, _SHARE)

    def round(self) -> list[str]:
        """Makes the plans that are due; returns the errors of regions without a plan. Blocks, without a transaction."""
        failures = []
        for region, intents in self._intents().items():
            with transaction(self._engine) as session:
                machines = read_machines(session, region, {one.pool for one in intents})
                newest = session.get(PoolPlan, region)
                age_s = func.extract("epoch", func.now() - PoolPlan.made_at)
                old_s = session.scalar(select(age_s).where(PoolPlan.region == region))
                has = newest.inputs if newest is not None else None
            inputs = _digest(intents, machines)
            if has == inputs and old_s is not None and float(old_s) < self._interval_s:
                continue
            try:
                self._make(region, intents, machines, inputs)
            except Exception as error:
                failures.append(f"region {region}: {error}")
        return failures

    def _intents(self) -> dict[str, list[Intent]]:
        """Returns the intents by region, and deletes the plans of regions that have none."""
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
            return out

    def _make(self, region: str, intents: Sequence[Intent], machines: Sequence[PooledMachine], inputs: str) -> None:
        # Imported late: the solver and matplotlib take a second and 100 MB, and most installations have no sizes.
        from activities.capacity.pool_plan_picture import draw
        from ras import moves, solve

        supply = aggregate(machines)
        plan = solve.plan(supply, intents)
        changes = moves.choose(plan, machines, supply)
        body = {
            "pools": _outcomes(plan, machines),
            "moves": [asdict(move) for move in changes.moves[:MOST_MOVES]],
            "move_count": len(changes.moves),
            "busy_move_count": sum(move.busy for move in changes.moves),
        }
        with transaction(self._engine) as session:
            session.merge(PoolPlan(region=region, inputs=inputs, body=body, svg=draw(region, plan), made_at=func.now()))


def read_machines(session: Session, region: str, pools: set[str]) -> list[PooledMachine]:
    """Returns the machines with GPUs that plans may use, sorted by id.

    Plans do not use machines that are lost, cordoned or drained, machines that only one tenant or service may use, and
    machines that were launched for a pool that is not in `pools`.
    """
    held = select(Allocation.workload).where(Allocation.machine == MachineRow.id, Allocation.released_at.is_(None))
    rows = session.execute(
        select(MachineRow.id, MachineRow.gpus, MachineRow.gpu_type, Cluster, InstanceRow.pool, held.exists())
        .join(Cluster, (Cluster.region == MachineRow.region) & (Cluster.name == MachineRow.cluster))
        .outerjoin(InstanceRow, (InstanceRow.machine == MachineRow.id) & InstanceRow.gone_at.is_(None))
        .where(MachineRow.region == region, MachineRow.gpus > 0, MachineRow.gpu_type.is_not(None))
        .where(MachineRow.state != "lost", MachineRow.cordon.is_(None), MachineRow.draining.is_(False))
        .where(Cluster.tenant.is_(None), Cluster.service.is_(None))
        .order_by(MachineRow.id)
    )
    out = []
    for id_, gpus, gpu_type, cluster, pool, busy in rows:
        if pool is None or pool in pools:
            domain = cluster.datacenter or cluster.zone or cluster.name
            usd_per_h = gpus * float(cluster.prices.get(str(gpu_type), 0.0))
            type_ = PooledType(f"{gpus} {gpu_type}", str(gpu_type), gpus, usd_per_h, cluster.capacity)
            out.append(PooledMachine(id_, domain, type_, pool or NO_POOL, busy))
    return out


def _digest(intents: Sequence[Intent], machines: Sequence[PooledMachine]) -> str:
    """Returns a digest of sizes and machines. Which machines are in use changes too often, and is left out."""
    wanted = [(*sorted(one.sizes.items()), one.pool, one.failure_buffer, one.survives_loss, one.max_share,
               sorted(one.kinds), one.max_usd_per_h) for one in intents]  # fmt: skip
    there = [(one.id, one.domain, one.type.name, one.type.usd_per_h, one.type.capacity, one.pool) for one in machines]
    return hashlib.sha256(json.dumps([wanted, there]).encode()).hexdigest()


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
