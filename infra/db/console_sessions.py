"""Logins at the console: a row for each browser that has logged in, until it logs out or its time is over."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Row, bindparam, delete, func, or_, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from infra.db.base import NOW, Base, Json
from infra.db.tenants import ApiKey


class ConsoleSession(Base):
    """A login at the console with an API key, or with a token of an issuer."""

    __tablename__ = "console_session"
    sha256: Mapped[str] = mapped_column(primary_key=True)
    """Hash of the secret in the browser's cookie."""
    key: Mapped[str | None] = mapped_column(ForeignKey(ApiKey.id, ondelete="CASCADE"))
    """The key; None: it was a token."""
    token: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The caller that the token names; None: it was a key."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]


_FOUND = (
    select(
        ConsoleSession.token, ConsoleSession.expires_at, ApiKey.id, ApiKey.role, ApiKey.tenant, ApiKey.label,
        ApiKey.machine,
    )
    .outerjoin(ApiKey, ApiKey.id == ConsoleSession.key)
    .where(
        ConsoleSession.sha256 == bindparam("sha256"), ConsoleSession.expires_at > func.now(),
        or_(ConsoleSession.key.is_(None), ApiKey.is_good()),
    )
)  # fmt: skip


def open_session(session: Session, made: ConsoleSession) -> None:
    """Adds a login, and deletes those whose time is over."""
    session.execute(delete(ConsoleSession).where(ConsoleSession.expires_at <= func.now()))
    session.add(made)


def find_session(session: Session, sha256: str) -> Row[*tuple[Any, ...]] | None:
    """Returns a login with the columns of its key; None: it has ended, or its key has expired or was revoked."""
    return session.execute(_FOUND, {"sha256": sha256}).first()


def close_session(session: Session, sha256: str) -> None:
    """Ends a login."""
    session.execute(delete(ConsoleSession).where(ConsoleSession.sha256 == sha256))
