"""Notifications to external receivers: one row for each receiver and event. Triggers write the rows with the event
(`functions/deliveries.sql`), and `activities.notify` sends them at least once.
"""

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import CheckConstraint, Index, select, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from infra.db.base import NOW, Base, Json


class Delivery(Base):
    """One notification of one receiver."""

    __tablename__ = "delivery"
    id: Mapped[str] = mapped_column(primary_key=True, server_default=text("'msg_' || gen_random_uuid()"))
    """The id that is sent with each try, so that the receiver can drop duplicates."""
    kind: Mapped[str]
    """`workload.succeeded`, `workload.failed`, `workload.cancelled`, `service.ended`, `alert` or `report`."""
    tenant: Mapped[str | None]
    subject: Mapped[str | None]
    """The id of the workload or service. Not a foreign key, because the id may be of either."""
    receiver: Mapped[Json]
    """A `domain.notify_spec.NotifySpec`."""
    lane: Mapped[str]
    """The tenant with the server of a webhook, or with `mail` for e-mail. Lanes do not delay each other."""
    facts: Mapped[Json]
    """The content of the notification, as of the time of the event."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    due_at: Mapped[datetime] = mapped_column(server_default=NOW)
    """Time of the next try."""
    tries: Mapped[int] = mapped_column(server_default="0")
    error: Mapped[str | None]
    """Why the last try failed."""
    state: Mapped[str] = mapped_column(
        CheckConstraint("state in ('due', 'delivered', 'failed')", name="delivery_state"), server_default="due"
    )
    ended_at: Mapped[datetime | None]
    """When it was delivered, or the last try failed."""
    __table_args__ = (
        CheckConstraint(
            "kind in ('workload.succeeded', 'workload.failed', 'workload.cancelled', 'service.ended', 'alert',"
            " 'report')",
            name="delivery_kind",
        ),
        Index("delivery_due", "lane", "due_at", postgresql_where=text("state = 'due'")),
        Index("delivery_old", "created_at", postgresql_where=text("state = 'due'")),
        Index("delivery_subject", "subject"),
    )


# One index probe for each lane, however many notifications wait in it.
_DUE = text(
    "with recursive lanes as ("
    " (select lane from delivery where state = 'due' order by lane limit 1) union all"
    " select (select lane from delivery where state = 'due' and lane > l.lane order by lane limit 1)"
    " from lanes as l where l.lane is not null"
    ") select d.* from lanes as l cross join lateral ("
    " select *, row_number() over (order by due_at) as place from delivery"
    " where state = 'due' and lane = l.lane and due_at <= now() and id <> all(:sending)"
    " order by due_at limit :each) as d order by d.place, d.due_at limit :most"
)


def due_deliveries(session: Session, sending: Collection[str], each: int, most: int) -> Sequence[Delivery]:
    """Returns due notifications except those in `sending`: at most `each` of a lane, the lanes in turn."""
    found = select(Delivery).from_statement(_DUE)
    return session.scalars(found, {"sending": list(sending), "each": each, "most": most}).all()


def lane_of(whose: str, receiver: Json) -> str:
    """Returns the lane of a receiver in the settings (of others: `notify_receivers` in `functions/deliveries.sql`)."""
    return f"{whose} {'mail' if receiver.get('email') else shown_receiver(receiver)}"


def deliveries_of(session: Session, subject: str) -> Sequence[Delivery]:
    """Returns the notifications about a workload or a service, oldest first."""
    return session.scalars(
        select(Delivery).where(Delivery.subject == subject).order_by(Delivery.created_at, Delivery.id)
    ).all()


def shown_receiver(receiver: Json) -> str:
    """Returns a receiver as users see it: the address, or the server of the URL, whose path may be a secret."""
    if receiver.get("email") is not None:
        return str(receiver["email"])
    if receiver.get("webhook_secret") is not None:
        return f"the webhook in secret {receiver['webhook_secret']}"
    return "/".join(str(receiver["webhook"]).split("/")[:3])
