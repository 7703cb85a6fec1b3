"""Launches of replicas: the workload of a replica and, if it gets machines of its own, their instances."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from activities.capacity.clusters import make_cluster
from activities.capacity.ledger import add_instance
from activities.services.replica_rows import replicas_by_zone
from capacity.offers import Offer, OfferKey
from domain.capacity import CapacityKind
from domain.ids import joined
from domain.priority import LOWEST_LEVEL
from domain.service import ResourceOption, ServiceSpec
from domain.spread import SpreadLevel, SpreadRule
from infra.db import events
from infra.db.capacity import InstanceRow
from infra.db.enqueue import enqueue
from infra.db.models import Cluster, Machine, Workload
from infra.db.services import ServiceReplica, ServiceRow
from infra.db.tenants import Tenant
from services.values import LaunchReplica
from services.workloads import SHARED, replica_workload
from services.zones import ZoneOffer, cheapest_on_demand, option_of

NO_MACHINE = "no_machine_fits"
OFFERS_UNKNOWN = "offers_unknown"
MACHINE_LIMIT = "machine_limit"
NO_OTHER_ZONE = "no_other_zone"
"""The notes why a replica was not launched."""


@dataclass(frozen=True)
class LaunchMarket:
    """Where replicas may be launched now."""

    zones: Mapping[str, ZoneOffer]
    """The zones of the policy, by name."""
    offers: Sequence[Offer] | None
    """None: unknown, because a provider has not answered yet."""
    refused: Collection[OfferKey]
    """The offers that were refused recently."""
    tenant_machines: int
    """The largest number of machines that the services of a tenant may have."""


def launch(
    session: Session, row: ServiceRow, spec: ServiceSpec, action: LaunchReplica, market: LaunchMarket
) -> str | None:
    """Launches a replica in the session's transaction.

    A spot replica gets machines of its own in the zone that the policy chose. An on-demand replica of a service on spot
    machines, or whose first option names a provider or a zone, gets the cheapest on-demand machines if a provider
    offers any. Other replicas run on shared machines, with the first option that names neither and that one can hold.

    Returns:
        None; or the note why nothing was launched: the version accepts no machine of the zone, the offers are unknown,
        or the tenant's services have as many machines as they may have.
    """
    held = replicas_by_zone(session, row.id, action.replaces)
    offer, option = _machine_of(session, spec, action, market, held)
    if option is None and offer is not None:
        return NO_OTHER_ZONE
    if option is None:
        return OFFERS_UNKNOWN if market.offers is None else NO_MACHINE
    if offer is not None and _machines(session, row.tenant) + spec.machines > market.tenant_machines:
        return MACHINE_LIMIT
    number, row.replicas = row.replicas, row.replicas + 1
    cluster = None if offer is None else _cluster(session, row.id, offer)
    # On machines of its own, a replica competes only with others of the service, which must not evict each other.
    level = spec.level if offer is not None else level_of(session, spec, is_base=action.is_base)
    shape = None if offer is None else offer.shape
    spread = _spread(session, row.id, spec, action)
    wanted = replica_workload(spec, number, level=level, cluster=cluster, option=option, shape=shape, spread=spread)
    if offer is not None:  # Clusters of two regions may have the same name.
        wanted = wanted.model_copy(update={"regions_allowed": (offer.region,)})
    workload = enqueue(session, wanted, f"service {row.name}")
    for _ in range(spec.machines if offer is not None and cluster is not None else 0):
        assert offer is not None and cluster is not None
        add_instance(session, offer, row.id, cluster, workload=workload.id)
    session.add(
        ServiceReplica(
            service=row.id, number=number, version=action.version, workload=workload.id, kind=action.kind.value,
            zone=action.zone, cluster=cluster, is_base=action.is_base, replaces=action.replaces,
            usd_per_h=None if offer is None else offer.usd_per_h * spec.machines,
        )
    )  # fmt: skip
    session.flush()
    events.record(
        session, "service.replica_launched", tenant=row.tenant, workload=workload.id,
        region=None if offer is None else offer.region,
        detail={
            "service": row.id, "name": row.name, "replica": number, "version": action.version,
            "kind": action.kind.value, "zone": action.zone if offer is None else f"{offer.region}/{offer.zone}",
        },
    )  # fmt: skip
    return None


def _spread(session: Session, service: str, spec: ServiceSpec, action: LaunchReplica) -> SpreadRule | None:
    """Returns the rule of a replica. The predecessor that it replaces does not count, because it ends soon."""
    if spec.spread.over is None:
        return None
    before = None if action.replaces is None else session.get(ServiceReplica, (service, action.replaces))
    beside = None if before is None else before.workload
    return SpreadRule(service, spec.spread.over, spec.spread.required, beside)


def _machines(session: Session, tenant: str) -> int:
    """Returns the number of machines of the tenant's services that are not gone."""
    own = select(func.count()).select_from(InstanceRow).join(ServiceRow, ServiceRow.id == InstanceRow.pool)
    return session.scalar(own.where(ServiceRow.tenant == tenant, InstanceRow.gone_at.is_(None))) or 0


def _machine_of(
    session: Session,
    spec: ServiceSpec,
    action: LaunchReplica,
    market: LaunchMarket,
    held: Mapping[tuple[str, str], int],
) -> tuple[Offer | None, ResourceOption | None]:
    """Returns the offer of the replica's own machines (None: it runs on shared ones) and the option that it satisfies.

    The option is None if the specification accepts no such machine, or requires another zone than that of the offer.
    `held` is the number of other replicas by region and zone.
    """
    if action.kind is CapacityKind.SPOT:
        known = market.zones.get(action.zone or "")
        return (None, None) if known is None else (known.offer, option_of(spec, known.offer))
    if not spec.uses_spot and _is_shared(spec.options[0]):
        return None, _shared_option(session, spec)
    if market.offers is None:  # It must not wait on shared machines because a provider was down.
        return None, None
    own = tuple(option for option in spec.options if spec.uses_spot or not _is_shared(option))
    there = spec.model_copy(update={"options": own})
    apart = spec.spread.required and spec.spread.over is not SpreadLevel.MACHINE
    free = [one for one in market.offers if not (apart and (one.region, one.zone) in held)]
    offer = cheapest_on_demand(there, free, market.refused, held)
    if offer is not None:
        return offer, option_of(there, offer)
    taken = cheapest_on_demand(there, market.offers, market.refused)
    return (None, _shared_option(session, spec)) if taken is None else (taken, None)


def _is_shared(option: ResourceOption) -> bool:
    """Returns whether a replica may run on shared machines, which have no provider and no zone."""
    return option.provider is None and option.zone is None


def _shared_option(session: Session, spec: ServiceSpec) -> ResourceOption | None:
    """Returns the first option for shared machines that one can hold, else the first; None: there is no such option."""
    options = [option for option in spec.options if _is_shared(option)]
    if len(options) < 2:
        return next(iter(options), None)
    shape = (Machine.region, Machine.gpu_type, Machine.gpus, Machine.cpus_milli, Machine.memory_bytes)
    machines = session.execute(
        select(*shape)
        .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
        .where(
            Machine.state != "lost", Cluster.service.is_(None), Cluster.capacity.in_([kind.value for kind in SHARED])
        )
        .distinct()
    ).all()
    return next((option for option in options if any(_holds(option, *machine) for machine in machines)), options[0])


def _holds(
    option: ResourceOption, region: str, gpu_type: str | None, gpus: int, cpus_milli: int, memory_bytes: int
) -> bool:
    return option.region in (None, region) and option.resources.fits(
        gpu_type=gpu_type, gpus=gpus, cpus_milli=cpus_milli, memory_bytes=memory_bytes
    )


def _cluster(session: Session, service: str, offer: Offer) -> str:
    """Returns the cluster of a service's machines of one provider, zone, kind and type; makes it if it is not there.

    All machines of a cluster have the same price, so the type is part of the name.
    """
    name = joined(service, offer.provider, offer.zone, offer.kind.value, offer.shape.machine_type)
    make_cluster(session, offer.region, name, offer, service)
    return name


def level_of(session: Session, spec: ServiceSpec, *, is_base: bool) -> int | None:
    """Returns the level of a replica on shared machines. Replicas beyond the least number have the next lower level."""
    if is_base:
        return spec.level
    own = session.get_one(Tenant, spec.tenant).level
    return min(LOWEST_LEVEL, max(own, spec.level or own) + 1)


def set_base(session: Session, spec: ServiceSpec, row: ServiceReplica, *, is_base: bool) -> None:
    """Runs a replica at the service's own priority level, or at the lower one. Its workload is locked.

    On machines of its own, the level stays: it competes only with others of the service.
    """
    row.is_base = is_base
    workload = session.get(Workload, row.workload, with_for_update=True) if row.cluster is None else None
    level = level_of(session, spec, is_base=is_base)
    if workload is not None and workload.level != level:
        before, workload.level = workload.level, level
        events.record(
            session, "workload.level", tenant=workload.tenant, workload=workload.id,
            detail={"level": level, "before": before, "replica": row.number},
        )  # fmt: skip
