"""Deletes uploaded working directories that no workload needs any more, from the database and the regions' buckets."""

import logging
from collections.abc import Collection, Iterable

from sqlalchemy import Engine, delete, select, text, tuple_

from domain.ids import archive_key
from infra.db.models import Archive, Workload
from infra.db.session import transaction
from mizzen.objects import ObjectStore, open_store

_log = logging.getLogger(__name__)
_AT_ONCE = 100


def forget_archives(engine: Engine, buckets: Iterable[str], keep_s: float) -> None:
    """Deletes archives that were uploaded more than `keep_s` seconds ago and that no unfinished workload uses.

    An archive in a bucket is a copy. It is deleted once no tenant has the archive, and written again when needed.
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
    for url in buckets if gone else ():
        try:
            _delete(open_store(url), gone)
        except Exception as error:  # Any error of this bucket's store. The other buckets are still processed.
            _log.warning("archives in bucket %s cannot be deleted now: %s", url, error)


def _delete(store: ObjectStore, gone: Collection[str]) -> None:
    for sha256 in sorted(gone):
        if store.size(archive_key(sha256)) is not None:
            store.delete(archive_key(sha256))
