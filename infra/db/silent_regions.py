"""The published list of regions that miss the deadline for bids. The scheduling process writes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.reasons import Reason, ReasonCode
from infra.db.logs import Publication

NAME = "silent_regions"
"""Name of the publication."""


@dataclass(frozen=True)
class SilentRegion:
    """A region that missed the deadline for bids and has not met it since."""

    since_s: float
    """When the region first missed the deadline, in epoch seconds."""
    slow: bool
    """Whether the region responds, but after the deadline. Work is still placed there."""


def silence_reason(region: str, since_s: float) -> Reason:
    """Returns the reason why nothing is placed in a region that misses the deadline."""
    since = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="seconds")
    return Reason(ReasonCode.REGION_SILENT, {"region": region, "since": since})


def publish_silent(session: Session, regions: Mapping[str, SilentRegion]) -> None:
    """Replaces the published list."""
    body = {name: [region.since_s, region.slow] for name, region in sorted(regions.items())}
    new = insert(Publication).values(name=NAME, body=body)
    session.execute(
        new.on_conflict_do_update(
            index_elements=["name"], set_={"body": new.excluded.body, "at": func.clock_timestamp()}
        )
    )


def silent_regions(session: Session) -> dict[str, SilentRegion]:
    """Returns the published regions that miss the deadline, by name."""
    body = session.scalar(select(Publication.body).where(Publication.name == NAME)) or {}
    return {name: SilentRegion(float(since_s), bool(slow)) for name, (since_s, slow) in body.items()}
