"""Endpoint for the audit log: all changes with their actors."""

from typing import Annotated

from fastapi import Query
from sqlalchemy import select

from api.auth import Viewer
from api.masking import mask
from api.paging import Page
from api.routing import Router
from api.state import StateOf
from api.views import AuditEntryView
from infra.db.logs import Audit

router = Router(prefix="/v1", tags=["tenants"])


class AuditPage(Page[AuditEntryView]):
    """A page of audit entries, newest first."""


@router.get("/audit", summary="List audit entries")
def list_audit(
    state: StateOf,
    caller: Viewer,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", description="`next_cursor` of the last page")] = None,
) -> AuditPage:
    """Lists changes, newest first. A key with a tenant gets only the changes of that tenant."""
    with state.transaction() as session:
        wanted = select(Audit).order_by(Audit.id.desc()).limit(limit + 1)
        if caller.tenant is not None:
            wanted = wanted.where(Audit.tenant == caller.tenant)
        if cursor is not None:
            wanted = wanted.where(Audit.id < int(cursor))
        rows = session.scalars(wanted).all()
        items = [AuditEntryView.from_row(row) for row in rows[:limit]]
        found = AuditPage(items=items, next_cursor=str(items[-1].id) if len(rows) > limit else None)
        return mask(session, caller, found)
