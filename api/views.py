"""Response models and helpers that several endpoints share."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import text
from sqlalchemy.orm import Session

from api.auth import Caller
from infra.db.deliveries import deliveries_of, shown_receiver

_AUDIT = text(
    "insert into audit (actor, tenant, action, target, detail)"
    " values (:actor, :tenant, :action, :target, cast(:detail as jsonb))"
)


class View(BaseModel):
    """Base class of responses.

    Describe a field with `Field(description=...)`. The OpenAPI document and the SDK's types contain this text; they do
    not contain a docstring under the field.
    """

    model_config = ConfigDict(frozen=True)

    @classmethod
    def from_row(cls, row: object, **others: Any) -> Self:
        """Returns the view of a row: the fields in `others`, and for each other field the row's attribute."""
        return cls(**{name: getattr(row, name) for name in cls.model_fields if name not in others}, **others)


class ReasonView(View):
    """The reason why an object waits, was stopped or ended: a code from a closed list, its details, and a sentence."""

    code: str = Field(examples=["quota_exceeded"])
    detail: dict[str, Any]
    sentence: str = Field(description="The code and its details as a sentence")


class ResourcesView(View):
    """GPU slots by type, and CPUs in cores."""

    gpus: dict[str, int] = Field(examples=[{"a100": 8}])
    cpus: float | None = Field(description="In a quota, null means no limit", examples=[64])


class NotificationView(View):
    """A notification about the end of a workload, an array or a service, to one receiver."""

    id: str = Field(description="The id that is sent with each try")
    kind: str = Field(examples=["workload.failed"])
    receiver: str = Field(description="The address, or the server of the webhook")
    state: str = Field(description="`due`, `delivered` or `failed`: it is not tried again")
    tries: int
    error: str | None = Field(description="Why the last try failed")
    created_at: datetime
    due_at: datetime = Field(description="When it is tried next, if it is due")
    ended_at: datetime | None = Field(description="When it was delivered, or the last try failed")


class AuditEntryView(View):
    """An entry of the audit log: one change, with its actor, its action and its target."""

    id: int
    at: datetime
    actor: str = Field(description="The id of an API key, `mizzen`, or `unknown` if the request had no known key")
    tenant: str | None
    action: str = Field(examples=["workload.cancel"])
    target: str
    detail: dict[str, Any]


def reason_view(body: Mapping[str, Any] | None) -> ReasonView | None:
    """Returns the view of a reason that was stored with `Reason.to_json`; None: there is none."""
    if not body or "code" not in body:
        return None
    code = str(body["code"])
    return ReasonView(code=code, detail=dict(body.get("detail") or {}), sentence=str(body.get("sentence") or code))


def notification_views(session: Session, subject: str) -> list[NotificationView]:
    """Returns the notifications about a workload or a service, oldest first."""
    found = deliveries_of(session, subject)
    return [NotificationView.from_row(one, receiver=shown_receiver(one.receiver)) for one in found]


def write_audit(
    session: Session, caller: Caller, action: str, target: str, *, tenant: str | None = None, **detail: object
) -> None:
    """Records the author of a change in the audit log, in the transaction of the change."""
    session.execute(
        _AUDIT,
        {"actor": caller.id, "tenant": tenant, "action": action, "target": target, "detail": json.dumps(detail)},
    )
