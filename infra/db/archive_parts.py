"""Parts of uploaded working directories."""

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from infra.db.tenants import ArchivePart


def part_sizes(session: Session, tenant: str, parts: Collection[str]) -> dict[str, int]:
    """Returns the sizes in bytes, by SHA-256, of the parts in `parts` that a tenant has uploaded."""
    sizes = select(ArchivePart.sha256, func.octet_length(ArchivePart.body))
    own = (ArchivePart.tenant == tenant, ArchivePart.sha256.in_(parts))
    return dict(session.execute(sizes.where(*own)).all())
