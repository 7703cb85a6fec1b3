"""The machines that plans of pools use, read as counts or one by one."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from infra.db.capacity import InstanceRow
from infra.db.models import Allocation, Cluster
from infra.db.models import Machine as MachineRow
from ras.supply import NO_POOL, PooledMachine, PooledType

_DOMAIN = func.coalesce(func.nullif(Cluster.datacenter, ""), func.nullif(Cluster.zone, ""), Cluster.name)
_USD_PER_GPU_H = func.coalesce(Cluster.prices[MachineRow.gpu_type].as_float(), 0.0)
_LAUNCHED_FOR = func.coalesce(InstanceRow.pool, NO_POOL)
_KEYS = (_DOMAIN, MachineRow.gpus, MachineRow.gpu_type, _USD_PER_GPU_H, Cluster.capacity, _LAUNCHED_FOR)


def count_machines(session: Session, region: str, pools: set[str], patience_s: float) -> list[list[Any]]:
    """Returns how many machines of each kind plans of a region may use (`_KEYS` and the number), sorted.

    The pools of the machines do not matter: only plans change them.
    """
    counted = _planned(region, pools, patience_s, *_KEYS, func.count()).group_by(*_KEYS).order_by(*_KEYS)
    return [list(row) for row in session.execute(counted)]


def read_machines(session: Session, region: str, pools: set[str], patience_s: float) -> list[PooledMachine]:
    """Returns the machines with GPUs that plans may use, sorted by id.

    Plans do not use machines that have been lost for `patience_s`, cordoned or drained ones, machines that only one
    tenant or service may use, and machines that were launched for a pool that is not in `pools`. A machine that moves
    is in the pool to which it moves. One that moved less than `patience_s` ago counts as in use, so that others are
    moved before it.
    """
    held = select(Allocation.workload).where(Allocation.machine == MachineRow.id, Allocation.released_at.is_(None))
    pool = func.coalesce(MachineRow.next_pool, MachineRow.pool)
    busy = or_(held.exists(), func.coalesce(MachineRow.pool_since > _ago(patience_s), False))
    found = _planned(region, pools, patience_s, MachineRow.id, *_KEYS, pool, busy).order_by(MachineRow.id)
    return [_machine(row) for row in session.execute(found)]


def _machine(row: Any) -> PooledMachine:
    id_, domain, gpus, gpu_type, usd_per_gpu_h, capacity, launched_for, pool, busy = row
    type_ = PooledType(f"{gpus} {gpu_type}", gpu_type, gpus, gpus * usd_per_gpu_h, capacity, launched_for)
    return PooledMachine(id_, domain, type_, launched_for or pool, busy)


def _ago(time_s: float) -> ColumnElement[datetime]:
    return func.now() - timedelta(seconds=time_s)


def _planned(region: str, pools: set[str], patience_s: float, *columns: Any) -> Any:
    there: ColumnElement[bool] = or_(MachineRow.state != "lost", MachineRow.lost_at > _ago(patience_s))
    return (
        select(*columns)
        .join(Cluster, (Cluster.region == MachineRow.region) & (Cluster.name == MachineRow.cluster))
        .outerjoin(InstanceRow, (InstanceRow.machine == MachineRow.id) & InstanceRow.gone_at.is_(None))
        .where(MachineRow.region == region, MachineRow.gpus > 0, MachineRow.gpu_type.is_not(None), there)
        .where(or_(MachineRow.next_pool.is_not(None), and_(MachineRow.cordon.is_(None), ~MachineRow.draining)))
        .where(Cluster.tenant.is_(None), Cluster.service.is_(None))
        .where(or_(InstanceRow.pool.is_(None), InstanceRow.pool.in_(pools)))
    )
