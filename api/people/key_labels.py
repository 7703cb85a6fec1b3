"""Labels of keys, which people recognise, by the ids that reasons and the audit log have."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Caller
from infra.db.tenants import ApiKey


def labels_of(session: Session, caller: Caller, ids: set[str]) -> dict[str, str]:
    """Returns the labels of keys that the caller may see: of its tenant, or of all. Keys without one are left out."""
    wanted = select(ApiKey.id, ApiKey.label).where(ApiKey.id.in_(ids), ApiKey.label != "")
    if caller.tenant is not None:
        wanted = wanted.where(ApiKey.tenant == caller.tenant)
    return {row.id: row.label for row in session.execute(wanted)}
