"""Which regions' buckets do not answer, as the regions' workers last published it."""

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
"""A region's publication."""


@dataclass(frozen=True)
class BucketState:
    """What is known of a region's bucket."""

    url: str
    is_marked: bool = False
    """The marker object was written: from then on it must be there."""
    failing_since_s: float | None = None
    """Seconds since 1970; None: it answers."""
    error: str = ""
    """What the last failed check said."""

    def reason(self, region: str) -> Reason | None:
        """Why nothing is placed in the region; None: its bucket answers."""
        if self.failing_since_s is None:
            return None
        since = datetime.fromtimestamp(self.failing_since_s, UTC).isoformat(timespec="seconds")
        return Reason(ReasonCode.BUCKET_UNAVAILABLE, {"region": region, "since": since, "error": self.error})


def bucket_states(session: Session, regions: Iterable[str]) -> dict[str, BucketState]:
    """What is published, by region; regions that were never checked are not in it."""
    names = {_NAME.format(region): region for region in regions}
    found = session.execute(select(Publication.name, Publication.body).where(Publication.name.in_(names)))
    return {names[name]: BucketState(**body) for name, body in found}


def failing_buckets(session: Session, regions: Iterable[str]) -> dict[str, Reason]:
    """Regions whose buckets do not answer, with the reason why nothing is placed there."""
    found = ((region, state.reason(region)) for region, state in bucket_states(session, regions).items())
    return {region: reason for region, reason in sorted(found) if reason is not None}


def publish_bucket(session: Session, region: str, state: BucketState) -> None:
    """Replaces what is published of one region, and wakes the scheduler."""
    new = insert(Publication).values(name=_NAME.format(region), body=asdict(state))
    session.execute(
        new.on_conflict_do_update(
            index_elements=["name"], set_={"body": new.excluded.body, "at": func.clock_timestamp()}
        )
    )
    outbox.wake_scheduler(session)


def forget_bucket(session: Session, region: str) -> None:
    """The region is removed."""
    session.execute(delete(Publication).where(Publication.name == _NAME.format(region)))
