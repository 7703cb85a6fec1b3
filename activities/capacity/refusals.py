"""Refused launches, as rows of the ledger and as reasons."""

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from capacity.offers import Offer
from capacity.provider import LaunchRefused, Refusal
from domain.reasons import Reason, ReasonCode, in_words
from infra.db.capacity import LaunchRefusal

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
