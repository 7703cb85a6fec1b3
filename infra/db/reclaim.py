"""The observed rates at which owners take back the machines of voluntary clusters."""

from sqlalchemy import ForeignKey, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import Text

from infra.db.base import Base, Json


class SiteHazard(Base):
    """The hazards of a region's lent machines, as learned so far (`reclaim.hazard_state`)."""

    __tablename__ = "site_hazard"
    region: Mapped[str] = mapped_column(ForeignKey("region.name", ondelete="CASCADE"), primary_key=True)
    counts: Mapped[Json] = mapped_column(JSONB)
    """The counts of departures without notice up to the last control period, a `reclaim.hazard_state.HazardState` as
    JSON."""
    noticed: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The hazards of departures with notice."""
    seen: Mapped[str]
    """The position in the event log up to which departures are counted (`infra.db.events.Cursor`)."""
    lent: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text("'{}'"))
    """The machines that were lent at the last control period."""
    machines: Mapped[Json] = mapped_column(JSONB, server_default=text("'{}'"))
    """The expected departures per hour of each machine, a `reclaim.buildings.Rate` as JSON."""
