"""Who holds the GPUs, or the cores, that a waiting workload or a tenant could use."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from api.auth import Caller
from api.workloads.views import JobView
from domain.capacity import CPU

OTHERS = "other tenants"
"""Stands for all tenants that the caller may not see."""
_HELD = text(
    "select w.tenant, sum(case when cast(:cpu as boolean) then a.cpus_milli / 1000.0 else g.held end) as held"
    " from attempt as a join workload as w on w.id = a.workload,"
    " lateral (select coalesce(sum(value::bigint) filter (where key = any(:types)), 0) as held"
    "          from jsonb_each_text(a.gpu_types)) as g"
    " where a.released_at is null group by w.tenant"
)


@dataclass(frozen=True)
class Holder:
    """What a tenant holds of the resources."""

    tenant: str
    held: float
    """GPUs, or cores."""


def wanted_by(jobs: Iterable[JobView]) -> list[str]:
    """Returns the types of GPUs that the jobs of a workload accept, or `cpu` if it needs none."""
    return sorted({name for job in jobs if job.resources.gpus for name in job.resources.gpu_types}) or [CPU]


def holders(session: Session, caller: Caller, resources: Iterable[str]) -> list[Holder]:
    """Returns who holds GPUs of these types together, or cores (`cpu`): the most first, what others hold as one."""
    types = list(resources)
    found: dict[str, float] = {}
    for tenant, held in session.execute(_HELD, {"types": types, "cpu": types == [CPU]}):
        name = tenant if caller.sees(tenant) else OTHERS
        found[name] = found.get(name, 0.0) + float(held)
    rows = [Holder(tenant, held) for tenant, held in found.items() if held]
    return sorted(rows, key=lambda one: (one.tenant == OTHERS, -one.held, one.tenant))
