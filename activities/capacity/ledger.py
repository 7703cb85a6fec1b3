"""Entries of the ledger of instances, for pools and for services: requests, ends, and refused launches."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from capacity.offers import Offer, OfferKey
from capacity.provider import LaunchRefused, Refusal
from domain import ids
from domain.reasons import Reason, ReasonCode, in_words
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
    """Writes a new instance of an offer into the ledger, with the message that starts its workflow; returns its id.

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


def request_end(session: Session, instance: str, reason: Reason) -> bool:
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


_CODES = {
    Refusal.CAPACITY.value: ReasonCode.CAPACITY_REFUSED,
    Refusal.QUOTA.value: ReasonCode.PROVIDER_QUOTA,
    Refusal.REQUEST.value: ReasonCode.LAUNCH_REQUEST_REFUSED,
}


def record_refusal(session: Session, instance: str, offer: Offer, refused: LaunchRefused) -> None:
    """Writes that a provider refused to launch an instance. Idempotent."""
    session.execute(
        insert(LaunchRefusal)
        .values(
            instance=instance,
            provider=offer.provider,
            region=offer.region,
            zone=offer.zone,
            kind=offer.kind.value,
            machine_type=offer.shape.machine_type,
            refusal=refused.refusal.value,
            words=refused.words,
        )
        .on_conflict_do_nothing()
    )


def refusal_reason(row: LaunchRefusal, retry_at_s: float | None = None) -> Reason:
    """Returns the reason for a refused launch, with the provider's error message, and when the offer is tried again."""
    detail = {
        "provider": row.provider, "zone": row.zone, "kind": row.kind, "machine_type": row.machine_type,
        "words": row.words,
    }  # fmt: skip
    if retry_at_s is not None:
        detail["retry_at"] = in_words(retry_at_s)
    return Reason(_CODES[row.refusal], detail)
