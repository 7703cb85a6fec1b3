"""Logins at the console: a row for each browser that has logged in, until it logs out or the login expires.

A link that logs a browser in once is also such a row, until the link is used.
"""

import hashlib
import secrets
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ForeignKey, Row, bindparam, delete, false, func, or_, select
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
    """The key with which the user logged in; None: it was a token."""
    token: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The caller that the token identified; None: it was a key."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]
    is_link: Mapped[bool] = mapped_column(server_default=false())
    """Whether `sha256` is the hash of a link's secret instead of a cookie's."""


LINK_PATH = "/console/enter"
"""Path of a link; its query is `link=SECRET`."""
LINK_S = 300.0
"""How long a link is valid, in seconds, unless it is used before."""
_FOUND = (
    select(
        ConsoleSession.token, ConsoleSession.expires_at, ApiKey.id, ApiKey.role, ApiKey.tenant, ApiKey.label,
        ApiKey.machine, ApiKey.person,
    )
    .outerjoin(ApiKey, ApiKey.id == ConsoleSession.key)
    .where(
        ConsoleSession.sha256 == bindparam("sha256"), ConsoleSession.expires_at > func.now(),
        ~ConsoleSession.is_link,
        or_(ConsoleSession.key.is_(None), ApiKey.is_good()),
    )
)  # fmt: skip


def open_session(session: Session, made: ConsoleSession) -> None:
    """Stores a login, and deletes the expired logins."""
    session.execute(delete(ConsoleSession).where(ConsoleSession.expires_at <= func.now()))
    session.add(made)


def find_session(session: Session, sha256: str) -> Row[*tuple[Any, ...]] | None:
    """Returns a login with the columns of its key; None: it has ended, or its key has expired or was revoked."""
    return session.execute(_FOUND, {"sha256": sha256}).first()


def close_session(session: Session, sha256: str) -> None:
    """Ends a login."""
    session.execute(delete(ConsoleSession).where(ConsoleSession.sha256 == sha256))


def hash_secret(secret: str) -> str:
    """Returns the hash by which a login is found. A secret has 256 random bits, so it needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_link(session: Session, key: str) -> str:
    """Returns the path of a new link that logs one browser in with an API key, once, within `LINK_S`."""
    secret = secrets.token_urlsafe(32)
    expires_at = func.now() + timedelta(seconds=LINK_S)
    open_session(session, ConsoleSession(sha256=hash_secret(secret), key=key, expires_at=expires_at, is_link=True))
    return f"{LINK_PATH}?link={secret}"


def take_link(session: Session, secret: str) -> ApiKey | None:
    """Ends a link; returns its key. None: it was used or has expired, or its key has expired or was revoked."""
    key = session.scalar(
        delete(ConsoleSession)
        .where(
            ConsoleSession.sha256 == hash_secret(secret), ConsoleSession.is_link, ConsoleSession.expires_at > func.now()
        )
        .returning(ConsoleSession.key)
    )
    return session.scalar(select(ApiKey).where(ApiKey.id == key, ApiKey.is_good()))
