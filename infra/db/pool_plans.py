"""The newest plan of the pools of each region (`ras`)."""

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from infra.db.base import NOW, Base, Json


class PoolPlan(Base):
    """A plan of the pools of one region that have intended sizes. It is replaced by the next plan."""

    __tablename__ = "pool_plan"
    region: Mapped[str] = mapped_column(ForeignKey("region.name", ondelete="CASCADE"), primary_key=True)
    made_at: Mapped[datetime] = mapped_column(server_default=NOW)
    inputs: Mapped[str]
    """Digest of the sizes and machines of which the plan was made."""
    body: Mapped[Json] = mapped_column(JSONB)
    """`pools`, `moves`, `move_count` and `busy_move_count`: see `api.fleet.pool_plans`."""
    svg: Mapped[str]
    """Picture of the plan."""
