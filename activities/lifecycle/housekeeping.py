"""Housekeeping: deletes data whose retention time has passed."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, delete, exists, func, select, text, update
from temporalio import activity

from activities.data.archives import forget_archives
from activities.data.placement_runs import forget_placement_runs
from domain import ids
from domain.protocol import Activity
from infra.config import Settings
from infra.db import changes
from infra.db.capacity import InstanceRow
from infra.db.logs import Audit, Event, Outbox, UsageRun
from infra.db.models import Attempt, Cluster, Region, Workload
from infra.db.services import ServiceRequests, ServiceRow
from infra.db.session import transaction
from mizzen.objects.store import ObjectStore, open_store

_log = logging.getLogger(__name__)
_EXPIRED_AT_ONCE = 1000
_KEEP_MAIL_S = 3600.0
_KEEP_REQUESTS_S = 86400.0
"""The retention time of the counts of requests of services."""
_KEEP_CHANGES_S = 3600.0
"""The retention time of the change log. A scheduler process whose last read is older does a full read."""


class HousekeepingActivities:
    """The activities of the housekeeping workflow."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.COLLECT.value)
    async def collect(self) -> float:
        """Does nothing. Histories from before progress was read in a separate loop still call it."""
        return 0.0

    @activity.defn(name=Activity.RECONCILE.value)
    async def reconcile(self) -> float:
        """Does nothing. Histories from before reconciling ran in a separate loop still call it."""
        return 0.0

    @activity.defn(name=Activity.EXPIRE.value)
    def expire(self) -> float:
        """Deletes objects of finished workloads, remains of interrupted writers and copies, and old records.

        The objects of a workload are its logs, checkpoints and launch descriptions. Old records include changes and
        delivered mail. A workload's records are kept longer than its objects, and its events at least as long as the
        workload's row.
        """
        lifecycle = self._settings.lifecycle
        with transaction(self._engine) as session:
            buckets = session.scalars(select(Region.bucket_url).order_by(Region.name)).all()
            stores = [url for url in session.scalars(select(Cluster.store_url).distinct()) if url is not None]
            old = session.scalars(
                select(Workload.id)
                .where(Workload.expired_at.is_(None), Workload.finished_at < _ago(lifecycle.keep_finished_s))
                .order_by(Workload.id)
                .limit(_EXPIRED_AT_ONCE)
            ).all()
        for workload in old:
            activity.heartbeat(workload)
            try:
                for url in (*buckets, *self._stores_of(workload)):
                    _delete_objects(open_store(url), workload)
            except Exception as error:  # Any error of the bucket's store. The other workloads are still processed.
                _log.warning("objects of workload %s cannot be deleted now: %s", workload, error)
                continue
            with transaction(self._engine) as session:
                session.execute(update(Workload).where(Workload.id == workload).values(expired_at=func.now()))
        for url in sorted({*buckets, *stores}):
            activity.heartbeat(url)
            try:
                store = open_store(url)
                store.tidy()
                store.tidy_uploads(self._settings.copies.keep_unfinished_s)
            except Exception as error:
                _log.warning("remains of interrupted writers in %s cannot be removed now: %s", url, error)
        forget_archives(self._engine, buckets, lifecycle.keep_archives_s)
        forget_placement_runs(self._engine, lifecycle.keep_records_s)
        with transaction(self._engine) as session:
            long_ago = _ago(lifecycle.keep_records_s)
            session.execute(delete(Workload).where(Workload.expired_at.is_not(None), Workload.finished_at < long_ago))
            known = exists().where(Workload.id == Event.workload)
            session.execute(delete(Event).where(Event.at < long_ago, ~known))
            session.execute(delete(Audit).where(Audit.at < long_ago))
            session.execute(delete(UsageRun).where(UsageRun.ended_at < long_ago))
            session.execute(delete(ServiceRow).where(ServiceRow.ended_at < long_ago))
            # The cost of a service is the sum over its instances, so they are kept as long as the service.
            of_service = exists().where(ServiceRow.id == InstanceRow.pool)
            session.execute(delete(InstanceRow).where(InstanceRow.gone_at < long_ago, ~of_service))
            session.execute(delete(ServiceRequests).where(ServiceRequests.second < time.time() - _KEEP_REQUESTS_S))
            session.execute(delete(Outbox).where(Outbox.delivered_at < _ago(_KEEP_MAIL_S)))
            changes.forget(session, timedelta(seconds=_KEEP_CHANGES_S))
        return 0.0

    def _stores_of(self, workload: str) -> Sequence[str]:
        """Returns the stores of clusters that any attempt used. Clusters may have other stores, or be removed, now."""
        used = select(Attempt.store_url).where(Attempt.workload == workload).distinct()
        with transaction(self._engine) as session:
            return sorted(url for url in session.scalars(used) if url is not None)


def _delete_objects(store: ObjectStore, workload: str) -> None:
    for prefix in (ids.checkpoint_prefix(workload), f"logs/{workload}/", f"launches/{workload}/"):
        for info in list(store.list(prefix)):
            store.delete(info.key)


def _ago(seconds: float) -> Any:
    return text("now() - make_interval(secs => :s)").bindparams(s=seconds)
