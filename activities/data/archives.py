"""Deletes uploaded working directories that no workload needs any more, from the database and the regions' buckets."""

from collections.abc import Collection

from sqlalchemy import Engine, delete, select, text, tuple_

from domain.ids import archive_key
from infra.db.models import Workload
from infra.db.session import transaction
from infra.db.tenants import Archive
from mizzen.objects import ObjectStore

_AT_ONCE = 100


def forget_archives(engine: Engine, keep_s: float) -> set[str]:
    """Deletes archives that were uploaded more than `keep_s` seconds ago and that no unfinished workload uses.

    Returns the digests of archives that no tenant has any more. Their copies in buckets can be deleted
    (`delete_archives`); they are written again when needed.
    """
    workdir = Workload.spec["workdir"].astext
    live = (Workload.finished_at.is_(None), Workload.tenant == Archive.tenant, workdir.is_not(None))
    unused = Archive.sha256.not_in(select(workdir).where(*live))
    old = text("archive.created_at < now() - make_interval(secs => :s)").bindparams(s=keep_s)
    with transaction(engine) as session:
        # The condition is checked again under the row locks: a submission locks the archives that it uses.
        due = select(Archive.tenant, Archive.sha256).where(old, unused).limit(_AT_ONCE)
        rows = session.execute(due.with_for_update(skip_locked=True)).all()
        found = tuple_(Archive.tenant, Archive.sha256).in_([tuple(row) for row in rows])
        gone = set(session.scalars(delete(Archive).where(found, unused).returning(Archive.sha256)))
        gone -= set(session.scalars(select(Archive.sha256).where(Archive.sha256.in_(gone))))
    return gone


def delete_archives(store: ObjectStore, engine: Engine, gone: Collection[str]) -> None:
    """Deletes archives from a bucket. An archive that has been uploaded again since is kept."""
    with transaction(engine) as session:
        again = set(session.scalars(select(Archive.sha256).where(Archive.sha256.in_(gone))))
    for sha256 in sorted(set(gone) - again):
        if store.size(archive_key(sha256)) is not None:
            store.delete(archive_key(sha256))
