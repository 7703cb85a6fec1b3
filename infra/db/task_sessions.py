"""Open sessions in running tasks, one row each. The API process with the client's connection renews the row.

Rows that were not renewed belong to processes that were killed. They do not count any more, and the next process that
looks for stale rows deletes them.
"""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import CheckConstraint, ForeignKey, delete, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from infra.db.base import NOW, Base
from infra.db.logs import Audit
from infra.db.models import Workload

RENEW_S = 15.0
"""How often a row is renewed."""
STALE_S = 60.0
"""A row that was not renewed for so long is stale."""
_STALE = text(f"seen_at < clock_timestamp() - interval '{STALE_S} s'")


class SessionKind(StrEnum):
    """The kind of a session in a task."""

    EXEC = "exec"
    """Runs a command."""
    FORWARD = "forward"
    """Connects to ports."""


class TaskSession(Base):
    """A session in a running task, from its request to its end."""

    __tablename__ = "task_session"
    id: Mapped[str] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(ForeignKey(Workload.id, ondelete="CASCADE"))
    tenant: Mapped[str]
    attempt: Mapped[int]
    job: Mapped[str]
    task: Mapped[int]
    machine: Mapped[str]
    actor: Mapped[str]
    """The key of the request, as in the audit log."""
    kind: Mapped[str] = mapped_column(
        CheckConstraint(f"kind in ({', '.join(repr(kind.value) for kind in SessionKind)})", name="task_session_kind")
    )
    client_sha256: Mapped[str | None]
    """Hash of the client's token; None: it was used."""
    agent_sha256: Mapped[str | None]
    """Hash of the agent's token; None: it was not made yet, or was used."""
    process_url: Mapped[str | None]
    """URL of the API process that has the client's connection."""
    refusal: Mapped[str | None]
    """Why the agent cannot join the session."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    """When the row was made or renewed last."""


def forget_stale(session: Session) -> None:
    """Deletes stale rows. A session that had begun gets its end in the audit log."""
    gone = delete(TaskSession).where(_STALE).returning(TaskSession)
    for row in session.scalars(gone):
        if row.process_url is not None:
            detail = {"session": row.id, "because": "the API process that had the connection has ended"}
            session.add(
                Audit(actor=row.actor, tenant=row.tenant, action="session.end", target=row.workload, detail=detail)
            )
