"""Pilots: machines that a tenant contributes for its own use, with their clusters and their keys."""

from datetime import timedelta

from sqlalchemy import ColumnElement, Select, and_, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from infra.db.models import Allocation, Cluster, Machine
from infra.db.tenants import ApiKey, Tenant

_KEPT = timedelta(days=1)
"""How long an expired key of a pilot is shown."""
_OF_KEY = and_(
    Cluster.region == func.split_part(ApiKey.machine, "/", 1), Cluster.name == func.split_part(ApiKey.machine, "/", 2)
)


def own_cluster(session: Session, region: str, tenant: Tenant) -> str | None:
    """Returns the cluster of a tenant's pilots in a region, and creates it if it does not exist.

    None: the name is taken by a cluster of others.
    """
    name = f"own-{tenant.number}"
    session.execute(insert(Cluster).values(region=region, name=name, tenant=tenant.name).on_conflict_do_nothing())
    # An agent whose cluster does not exist creates it as a shared cluster, so this one must exist as long as its keys.
    found = session.get_one(Cluster, (region, name), with_for_update={"read": True, "key_share": True})
    return name if found.tenant == tenant.name else None


def pilots_of(tenant: str) -> Select[ApiKey, Machine | None]:
    """Returns the query for the keys of a tenant's pilots, each with its machine, if it has joined; sorted by id."""
    return (
        select(ApiKey, Machine)
        .join(Cluster, _OF_KEY)
        .outerjoin(Machine, Machine.id == ApiKey.machine)
        .where(Cluster.tenant == tenant, ApiKey.role == "machine")
        .order_by(ApiKey.machine)
    )


def machines_of(tenant: str) -> Select[str]:
    """Returns the query for the machines that only this tenant may use."""
    here = (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster)
    return select(Machine.id).join(Cluster, here).where(Cluster.tenant == tenant)


def gone_machines(lost_for_s: float) -> Select[str]:
    """Returns the query for machines of pilots that have been lost for this long and hold no workloads."""
    here = (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster)
    held = select(Allocation.workload).where(Allocation.machine == Machine.id, Allocation.released_at.is_(None))
    return (
        select(Machine.id)
        .join(Cluster, here)
        .where(
            Cluster.tenant.is_not(None),
            Machine.state == "lost",
            Machine.lost_at < func.now() - timedelta(seconds=lost_for_s),
            ~held.exists(),
        )
    )


def forget_expired_keys(session: Session) -> None:
    """Deletes the keys of pilots that have been expired for a day."""
    _delete_keys(session, Cluster.tenant.is_not(None), ApiKey.expires_at < func.now() - _KEPT)


def forget_own(session: Session, tenant: str) -> None:
    """Deletes a tenant's clusters, which must have no machines, and the keys of machines there."""
    _delete_keys(session, Cluster.tenant == tenant)
    session.execute(delete(Cluster).where(Cluster.tenant == tenant))


def _delete_keys(session: Session, *which: ColumnElement[bool]) -> None:
    session.execute(delete(ApiKey).where(_OF_KEY, *which).execution_options(synchronize_session=False))
