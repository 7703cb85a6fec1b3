"""Which regions miss the deadline for bids, as the scheduling process last published it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.reasons import Reason, ReasonCode
from infra.db.logs import Publication

NAME = "silent_regions"
"""The publication's name."""


@dataclass(frozen=True)
class SilentRegion:
    """A region that missed the deadline and has not met it since."""

    since_s: float
    """In seconds since 1970."""
    slow: bool
    """It answers, late: work is still placed there."""


def silence_reason(region: str, since_s: float) -> Reason:
    """Why nothing is placed in a silent region."""
    since = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="seconds")
    return Reason(ReasonCode.REGION_SILENT, {"region": region, "since": since})


def publish_silent(session: Session, regions: Mapping[str, SilentRegion]) -> None:
    """Replaces what is published."""
    body = {name: [region.since_s, region.slow] for name, region in sorted(regions.items())}
    new = insert(Publication).values(name=NAME, body=body)
    session.execute(
        new.on_conflict_do_update(
            index_elements=["name"], set_={"body": new.excluded.body, "at": func.clock_timestamp()}
        )
    )


def silent_regions(session: Session) -> dict[str, SilentRegion]:
    """What is published, by region; regions that answer in time are not in it."""
    body = session.scalar(select(Publication.body).where(Publication.name == NAME)) or {}
    return {name: SilentRegion(float(since_s), bool(slow)) for name, (since_s, slow) in body.items()}
