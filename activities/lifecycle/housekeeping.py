"""Housekeeping: deletes data whose retention time has passed, and uploads that no workload needs."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Engine, delete, exists, func, select, text, tuple_, update
from sqlalchemy.orm import Session
from temporalio import activity

from activities.data.buckets import check_marker, marked_regions
from activities.data.placement_runs import forget_placement_run, forget_placement_runs
from activities.heartbeat import heartbeating
from activities.lifecycle.store_work import Stores, Work
from activities.rounds import HOUSEKEEPING_LATE_S, RoundLog
from domain import ids
from domain.ids import archive_key
from domain.protocol.activities import Activity
from infra.config.settings import Settings
from infra.copies import CopyStore
from infra.db import changes
from infra.db.capacity import InstanceRow
from infra.db.costs import count_ended
from infra.db.deliveries import Delivery
from infra.db.lent_machines import count_given, forget_days
from infra.db.logs import Audit, Event, Outbox, UsageRun
from infra.db.models import Attempt, Cluster, Region, Workload
from infra.db.services import BalancerReport, ServiceRequests, ServiceRow
from infra.db.session import transaction
from infra.db.tenants import Archive, ArchivePart
from mizzen.objects import ObjectStore

_EXPIRED_AT_ONCE = 1000
_COUNTED_AT_ONCE = 5000
_KEEP_MESSAGES_S = 3600.0
_KEEP_REQUESTS_S = 86400.0
"""The retention time of the counts of requests of services."""
_KEEP_CHANGES_S = 3600.0
"""The retention time of the change log. A scheduler process whose last read is older does a full read."""


_DELETE_WORKLOADS = text(
    # The counts of an array include its elements, so these are kept as long as the array. It is deleted after them.
    "delete from workload as w where w.expired_at is not null"
    " and w.finished_at < now() - make_interval(secs => :keep_s)"
    # Its hours are not in the sums of its machines yet.
    " and not exists (select from given_pending where workload = w.id)"
    " and not exists (select from workload as head where head.id = w.array_id"
    "  and (head.finished_at is null or head.finished_at >= now() - make_interval(secs => :keep_s)))"
    " and not exists (select from workload as element where element.array_id = w.id"
    "  and element.finished_at is not null)"
)
_DELETE_MACHINE_CHANGES = text(
    # The last change of a machine before the kept time is its state at the begin of that time.
    "delete from machine_change as c where since < now() - make_interval(secs => :keep_s)"
    " and (not exists (select from machine where id = c.machine) or exists ("
    "  select from machine_change as later where later.machine = c.machine and later.since > c.since"
    "   and later.since < now() - make_interval(secs => :keep_s)))"
)
_STORES_S = 180.0
"""The time for work in stores in one round. The activity has five minutes."""


class HousekeepingActivities:
    """The activities of the housekeeping workflow."""

    def __init__(self, engine: Engine, settings: Settings, stores_s: float = _STORES_S) -> None:
        """`stores_s`: the time for work in stores in one round."""
        self._engine = engine
        self._settings = settings
        self._stores_s = stores_s
        self._stores = Stores()
        self._rounds = RoundLog(engine, "expiry", HOUSEKEEPING_LATE_S)
        self._after = ""
        """Workloads with ids after this one are next to expire. So those whose objects cannot be deleted, for example
        because a store was lost, do not keep the others waiting."""

    @activity.defn(name=Activity.EXPIRE.value)
    def expire(self) -> float:
        """Deletes objects of finished workloads, remains of interrupted writers and copies, and old records.

        The objects of a workload are its logs, outputs, checkpoints and launch descriptions. Old records include
        changes and delivered messages. A workload's records are kept longer than its objects, and its events at least
        as long as the workload's row.
        """
        with heartbeating(), self._rounds.one() as failures:
            # Records do not depend on stores that may not answer.
            self._count(count_ended)
            self._count(count_given)
            self._delete_records()
            failures += self._delete_objects()
            self._delete_records()  # Those of workloads whose objects were deleted just now.
        return 0.0

    def _count(self, count: Callable[[Session, int], int]) -> None:
        """Adds all that has ended to sums, before it is deleted."""
        counted = _COUNTED_AT_ONCE
        while counted == _COUNTED_AT_ONCE:
            with transaction(self._engine) as session:
                counted = count(session, _COUNTED_AT_ONCE)

    def _delete_records(self) -> None:
        long_ago = _ago(self._settings.lifecycle.keep_records_s)
        with transaction(self._engine) as session:
            session.execute(_DELETE_WORKLOADS, {"keep_s": self._settings.lifecycle.keep_records_s})
            known = exists().where(Workload.id == Event.workload)
            session.execute(delete(Event).where(Event.at < long_ago, ~known))
            session.execute(delete(Audit).where(Audit.at < long_ago))
            session.execute(delete(UsageRun).where(UsageRun.ended_at < long_ago))
            session.execute(delete(ServiceRow).where(ServiceRow.ended_at < long_ago))
            # The cost of a service is the sum over its instances, so they are kept as long as the service.
            of_service = exists().where(ServiceRow.id == InstanceRow.pool)
            session.execute(delete(InstanceRow).where(InstanceRow.gone_at < long_ago, ~of_service))
            session.execute(delete(ServiceRequests).where(ServiceRequests.second < time.time() - _KEEP_REQUESTS_S))
            session.execute(delete(BalancerReport).where(BalancerReport.reported_at < _ago(_KEEP_REQUESTS_S)))
            session.execute(delete(Delivery).where(Delivery.ended_at < long_ago))
            session.execute(delete(Outbox).where(Outbox.delivered_at < _ago(_KEEP_MESSAGES_S)))
            session.execute(_DELETE_MACHINE_CHANGES, {"keep_s": self._settings.lifecycle.keep_fleet_history_s})
            forget_days(session)
            changes.forget(session, timedelta(seconds=_KEEP_CHANGES_S))

    def _delete_objects(self) -> list[str]:
        """Deletes the objects; returns the messages of the stores where deletions failed."""
        lifecycle = self._settings.lifecycle
        with transaction(self._engine) as session:
            buckets = set(session.scalars(select(Region.bucket_url)))
            marked = marked_regions(session)
            stores = {url for url in session.scalars(select(Cluster.store_url).distinct()) if url is not None}
            old = session.scalars(
                select(Workload.id)
                .where(Workload.expired_at.is_(None), Workload.finished_at < _ago(lifecycle.keep_finished_s))
                .where(Workload.id > self._after)
                .order_by(Workload.id)
                .limit(_EXPIRED_AT_ONCE)
            ).all()
            # Clusters may have other stores, or be removed, now.
            used = session.execute(
                select(Attempt.workload, Attempt.store_url, func.bool_or(Attempt.started_at.is_not(None)))
                .where(Attempt.workload.in_(old), Attempt.store_url.not_in(lifecycle.dropped_stores))
                .group_by(Attempt.workload, Attempt.store_url)
            ).all()
        work: dict[str, list[tuple[str, Work]]] = defaultdict(list)
        forget_parts(self._engine)
        if gone := forget_archives(self._engine, lifecycle.keep_archives_s):
            for url in buckets:
                work[url].append(("archives", partial(delete_archives, engine=self._engine, gone=gone)))
        for url in buckets | stores:
            work[url].append(("remains of interrupted writers", self._tidy))
        for run, url in forget_placement_runs(self._engine, lifecycle.keep_records_s).items():
            work[url].append((run, partial(forget_placement_run, engine=self._engine, placement_run=run)))
        needed: dict[tuple[str, str], bool | None] = {
            (url, workload): has_run for workload, url, has_run in used if url is not None
        }  # fmt: skip
        for url, workload in sorted({*needed, *((url, workload) for url in buckets for workload in old)}):
            if (has_run := needed.setdefault((url, workload))) is None:
                work[url].append((workload, partial(_delete_objects, workload=workload)))
            else:
                leave = partial(self._leave_store, url=url, workload=workload, has_run=has_run)
                work[url].append((workload, leave))
        for url, regions in marked.items():
            work[url] = [(name, partial(_in_bucket, regions=regions, work=one)) for name, one in work[url]]
        done, failures = self._stores.run(work, self._stores_s)
        left = {workload for url, workload in needed.keys() - done}
        with transaction(self._engine) as session:
            expired = Workload.id.in_([workload for workload in old if workload not in left])
            session.execute(update(Workload).where(expired).values(expired_at=func.now()))
        self._after = old[-1] if len(old) == _EXPIRED_AT_ONCE else ""
        return failures

    def _leave_store(self, store: ObjectStore, url: str, workload: str, *, has_run: bool) -> None:
        """Deletes a workload's objects in the store of a cluster. A store without the marker is not the right one.

        The marker is deleted last, after its store has been removed from the attempts. So it is missed only if the
        store was never used, or has lost it.
        """
        marker = ids.checkpoint_marker_key(workload)
        if has_run and store.size(marker) is None:
            raise FileNotFoundError(
                f"the marker {marker} is missing: the store was emptied or replaced, or its folder is not mounted."
                " If the store is lost for good, add its URL to lifecycle.dropped_stores"
            )
        _delete_objects(store, workload, but=marker)
        own = (Attempt.workload == workload) & (Attempt.store_url == url)
        with transaction(self._engine) as session:
            session.execute(update(Attempt).where(own).values(store_url=None))
        store.delete(marker)

    def _tidy(self, store: CopyStore) -> None:
        store.tidy()
        store.tidy_uploads(self._settings.copies.keep_unfinished_s)


def _in_bucket(bucket: CopyStore, regions: Sequence[str], work: Work) -> None:
    """Does work in the bucket of regions. A bucket without their markers is not the right one, and must not count as
    empty: for example, its folder is not mounted on this host.
    """
    for region in regions:
        check_marker(bucket, region)
    work(bucket)


def _delete_objects(store: ObjectStore, workload: str, but: str | None = None) -> None:
    for prefix in (
        ids.checkpoint_prefix(workload),
        f"logs/{workload}/",
        f"launches/{workload}/",
        ids.outputs_prefix(workload),
    ):
        for info in list(store.list(prefix)):
            if info.key != but:
                store.delete(info.key)


def _ago(seconds: float) -> Any:
    return text("now() - make_interval(secs => :s)").bindparams(s=seconds)


_AT_ONCE = 100
_KEEP_PARTS_S = 86400.0
"""How long a part of an archive is kept after its last upload if no archive has it."""
_UNUSED_PARTS = text(
    "select p.tenant, p.sha256 from archive_part as p where p.used_at < now() - make_interval(secs => :keep_s)"
    " and not exists (select from (select a.tenant, jsonb_array_elements_text(a.parts) as sha256 from archive as a)"
    "  as used where (used.tenant, used.sha256) = (p.tenant, p.sha256)) limit 1000 for update of p skip locked"
)


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


def forget_parts(engine: Engine) -> None:
    """Deletes parts that no archive of their tenant has, a day after their last upload.

    An upload that finds a part here keeps it for another day before it makes an archive of it.
    """
    with transaction(engine) as session:
        unused = [tuple(row) for row in session.execute(_UNUSED_PARTS, {"keep_s": _KEEP_PARTS_S})]
        session.execute(delete(ArchivePart).where(tuple_(ArchivePart.tenant, ArchivePart.sha256).in_(unused)))


def delete_archives(store: ObjectStore, engine: Engine, gone: Collection[str]) -> None:
    """Deletes archives from a bucket. An archive that has been uploaded again since is kept."""
    with transaction(engine) as session:
        again = set(session.scalars(select(Archive.sha256).where(Archive.sha256.in_(gone))))
    for sha256 in sorted(set(gone) - again):
        if store.size(archive_key(sha256)) is not None:
            store.delete(archive_key(sha256))
