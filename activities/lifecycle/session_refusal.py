"""The activity about sessions in running tasks."""

from sqlalchemy import Engine, update
from temporalio import activity

from domain.protocol.activities import Activity
from domain.protocol.sessions import SessionRefusal
from infra.db.session import transaction
from infra.db.task_sessions import TaskSession

_MAX_WORDS = 1000


class SessionActivities:
    """The activity of the workflows that ask agents to join sessions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @activity.defn(name=Activity.REFUSE_SESSION.value)
    def refuse(self, refusal: SessionRefusal) -> None:
        """Records why an agent cannot join a session. The API process that has the client reads it."""
        why = refusal.why.replace("\0", "")[:_MAX_WORDS]
        with transaction(self._engine) as session:
            session.execute(update(TaskSession).where(TaskSession.id == refusal.session).values(refusal=why))
