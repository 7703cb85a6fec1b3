"""The published health of the regions' buckets. The regions' workers write it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.reasons import Reason, ReasonCode
from infra.db import outbox
from infra.db.logs import Publication

_NAME = "bucket/{}"
"""Pattern of the name of a region's publication."""


@dataclass(frozen=True)
class BucketState:
    """The result of the health checks of a region's bucket."""

    url: str
    is_marked: bool = False
    """Whether the marker object was written. If so, a check fails if it is missing."""
    failing_since_s: float | None = None
    """Since when the checks fail, in epoch seconds; None if the bucket is healthy."""
    error: str = ""
    """Error message of the last failed check."""

    def reason(self, region: str) -> Reason | None:
        """Returns the reason why nothing is placed in the region, or None if its bucket is healthy."""
        if self.failing_since_s is None:
            return None
        since = datetime.fromtimestamp(self.failing_since_s, UTC).isoformat(timespec="seconds")
        return Reason(ReasonCode.BUCKET_UNAVAILABLE, {"region": region, "since": since, "error": self.error})


def bucket_states(session: Session, regions: Iterable[str]) -> dict[str, BucketState]:
    """Returns the published states by region, without regions that were never checked."""
    names = {_NAME.format(region): region for region in regions}
    found = session.execute(select(Publication.name, Publication.body).where(Publication.name.in_(names)))
    return {names[name]: BucketState(**body) for name, body in found}


def failing_buckets(session: Session, regions: Iterable[str]) -> dict[str, Reason]:
    """Returns the regions whose buckets fail their checks, with the reason why nothing is placed there."""
    found = ((region, state.reason(region)) for region, state in bucket_states(session, regions).items())
    return {region: reason for region, reason in sorted(found) if reason is not None}


def publish_bucket(session: Session, region: str, state: BucketState) -> None:
    """Replaces the published state of one region's bucket, and wakes the scheduler."""
    new = insert(Publication).values(name=_NAME.format(region), body=asdict(state))
    session.execute(
        new.on_conflict_do_update(
            index_elements=["name"], set_={"body": new.excluded.body, "at": func.clock_timestamp()}
        )
    )
    outbox.wake_scheduler(session)


def forget_bucket(session: Session, region: str) -> None:
    """Deletes the published state of a removed region."""
    session.execute(delete(Publication).where(Publication.name == _NAME.format(region)))
