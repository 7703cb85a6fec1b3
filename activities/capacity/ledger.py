"""Entries of the ledger of instances, for pools and for services: requests, ends, and recent refusals."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from activities.capacity.refusals import refusal_reason
from capacity.offers import Offer, OfferKey
from domain import ids
from domain.reasons import Reason
from infra.db import outbox
from infra.db.capacity import InstanceRow, LaunchRefusal


def add_instance(
    session: Session,
    offer: Offer,
    owner: str,
    cluster: str,
    *,
    wanted_by: Mapping[str, Sequence[int]] | None = None,
    workload: str | None = None,
) -> str:
    """Writes a new instance of an offer into the ledger, with the mail that starts its workflow; returns its id.

    Args:
        session: the session whose transaction records the request.
        offer: the offer.
        owner: the name of the pool, or the id of the service.
        cluster: the cluster of the machine, which must exist.
        wanted_by: for a pool's instance, the workloads that wait for it.
        workload: for a service's instance, the workload of the replica that it is launched for.
    """
    row = InstanceRow(
        id=ids.new_instance_id(), region=offer.region, pool=owner, cluster=cluster, provider=offer.provider,
        zone=offer.zone, kind=offer.kind.value, machine_type=offer.shape.machine_type, gpus=offer.shape.gpus,
        gpu_type=offer.shape.gpu_type, cpus_milli=offer.shape.cpus_milli, memory_bytes=offer.shape.memory_bytes,
        usd_per_h=offer.usd_per_h, wanted_by=dict(wanted_by or {}), workload=workload,
        expected_at=func.now() + timedelta(seconds=offer.start_s),
    )  # fmt: skip
    session.add(row)
    session.flush()
    outbox.instance(session, row.id)
    return row.id


def tell_to_end(session: Session, instance: str, reason: Reason) -> bool:
    """Writes why an instance is to end, and signals its workflow; False: it is already to end, or is gone."""
    row = session.get(InstanceRow, instance, with_for_update=True)
    if row is None or row.ending is not None or row.gone_at is not None:
        return False
    row.ending = reason.to_json()
    outbox.instance(session, instance)
    return True


def recently_refused(session: Session, pause_s: float) -> dict[OfferKey, Reason]:
    """Returns the offers that were refused in the last `pause_s` seconds, each with its newest refusal, by key.

    The reasons name the time from which the offer is tried again.
    """
    recent = LaunchRefusal.at > text("now() - make_interval(secs => :s)").bindparams(s=pause_s)
    rows = session.scalars(select(LaunchRefusal).where(recent).order_by(LaunchRefusal.at))
    return {
        (row.provider, row.zone, row.kind, row.machine_type): refusal_reason(row, row.at.timestamp() + pause_s)
        for row in rows
    }
