"""Who holds the GPUs, or the cores, that a waiting workload or a tenant could use."""

from collections import Counter, defaultdict
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
    "select w.tenant, g.key, sum(g.value::bigint)::float8 from attempt as a join workload as w on w.id = a.workload,"
    " lateral jsonb_each_text(a.gpu_types) as g where a.released_at is null and g.key = any(:types) group by 1, 2"
    " union all select w.tenant, 'cpu', sum(a.cpus_milli) / 1000.0::float8 from attempt as a"
    " join workload as w on w.id = a.workload where a.released_at is null and 'cpu' = any(:types) group by 1"
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


def holders(session: Session, caller: Caller, types: Iterable[str]) -> dict[str, list[Holder]]:
    """Returns who holds GPUs of each type, or cores (`cpu`), the largest holder first.

    All tenants that the caller may not see are counted together as one holder, which comes last. Types of which nothing
    is held are left out.
    """
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tenant, kind, held in session.execute(_HELD, {"types": list(types)}):
        found[kind][tenant if caller.sees(tenant) else OTHERS] += held
    return {kind: _ranked(found[kind]) for kind in sorted(found) if any(found[kind].values())}


def holders_of_any(session: Session, caller: Caller, types: Iterable[str]) -> list[Holder]:
    """Returns who holds GPUs of these types together, or cores (`cpu`), as `holders`."""
    together: Counter[str] = Counter()
    for rows in holders(session, caller, types).values():
        together.update({one.tenant: one.held for one in rows})
    return _ranked(together)


def _ranked(amounts: Counter[str]) -> list[Holder]:
    rows = [Holder(tenant, held) for tenant, held in amounts.items() if held]
    return sorted(rows, key=lambda one: (one.tenant == OTHERS, -one.held, one.tenant))
