"""Answers that several endpoints share."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import text
from sqlalchemy.orm import Session

from api.auth import Caller

_AUDIT = text(
    "insert into audit (actor, tenant, action, target, detail)"
    " values (:actor, :tenant, :action, :target, cast(:detail as jsonb))"
)


class View(BaseModel):
    """Base of answers."""

    model_config = ConfigDict(frozen=True)


class ReasonView(View):
    """Why something waits, stopped or ended: a code of a closed list, its numbers, and a sentence made of them."""

    code: str = Field(examples=["quota_exceeded"])
    detail: dict[str, Any]
    sentence: str


class ResourcesView(View):
    """GPU slots by type, and CPUs in cores; as a quota, no CPUs (null) is no limit."""

    gpus: dict[str, int] = Field(examples=[{"a100": 8}])
    cpus: float | None = Field(examples=[64])


class AuditView(View):
    """One change: who made it, and to what."""

    id: int
    at: datetime
    actor: str
    """The id of an API key, `mizzen`, or `unknown` where no known key was given."""
    tenant: str | None
    action: str = Field(examples=["workload.cancel"])
    target: str
    detail: dict[str, Any]


def reason_view(body: Mapping[str, Any] | None) -> ReasonView | None:
    """A reason as `Reason.to_json` stored it."""
    if not body or "code" not in body:
        return None
    code = str(body["code"])
    return ReasonView(code=code, detail=dict(body.get("detail") or {}), sentence=str(body.get("sentence") or code))


def write_audit(
    session: Session, caller: Caller, action: str, target: str, *, tenant: str | None = None, **detail: object
) -> None:
    """Notes, in the transaction of the change, who made it."""
    session.execute(
        _AUDIT,
        {"actor": caller.id, "tenant": tenant, "action": action, "target": target, "detail": json.dumps(detail)},
    )
