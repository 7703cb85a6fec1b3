"""The restorations of a database from backups. A restored database is held until an operator adopts it.

Workers do not start on a held database, so a restored copy that runs beside the original system takes over no machines,
launches and terminates none, and deletes nothing in buckets.
"""

from datetime import datetime

from sqlalchemy import Identity, func, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from infra.db.base import NOW, Base
from infra.db.logs import Audit


class Restoration(Base):
    """A restoration of the database from a backup."""

    __tablename__ = "restoration"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    made_at: Mapped[datetime]
    """When the backup was made."""
    restored_at: Mapped[datetime] = mapped_column(server_default=NOW)
    adopted_at: Mapped[datetime | None]
    """When an operator ended the hold; None: the database is held."""


def held_since(session: Session) -> datetime | None:
    """Returns the time of the backup from which a held database was restored; None: the database is not held."""
    newest = select(Restoration.made_at).where(Restoration.adopted_at.is_(None)).order_by(Restoration.id.desc())
    return session.scalar(newest.limit(1))


def adopt(session: Session) -> datetime | None:
    """Ends the hold, with an entry in the audit log. Returns what `held_since` returned before."""
    made_at = held_since(session)
    if made_at is not None:
        session.execute(
            update(Restoration).where(Restoration.adopted_at.is_(None)).values(adopted_at=func.clock_timestamp())
        )
        detail = {"backup_made_at": made_at.isoformat()}
        session.add(Audit(actor="mizzen", tenant=None, action="installation.adopt", target="mizzen", detail=detail))
    return made_at
