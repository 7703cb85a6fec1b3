"""The loop that keeps pools, the ledger and what providers have in line with each other.

A round lists what each provider has, compares it with the ledger, and brings pools to their size. What it finds wrong
is done when the next round finds it again. All that it writes are rows with mail to the instances' workflows, so it may
be killed at any moment, and Temporal may lose its state.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, delete, func, select, text
from sqlalchemy.orm import Session
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.capacity.clusters import keep_cluster
from activities.capacity.refusals import refusal_reason
from activities.leader import Leader, lead
from activities.lifecycle.suspects import Suspects
from capacity.auditing import Differences, Entry, compare
from capacity.offers import Offer
from capacity.pools import Instance, Pool, changes, cluster_of
from capacity.providers import Found, Provider, ProviderUnavailable
from domain import ids
from domain.capacity import CapacityKind
from domain.reasons import Reason, ReasonCode
from infra.config import Settings
from infra.db import events, outbox
from infra.db.capacity import InstanceRow, LaunchRefusal, PoolRow
from infra.db.models import Allocation, Machine
from infra.db.session import in_thread, transaction
from lifecycle.instances import InstancePhase

_log = logging.getLogger(__name__)
_RUNNING = "WorkflowType = 'InstanceWorkflow' AND ExecutionStatus = 'Running'"


class Keeper:
    """Does the rounds. One works at a time, others wait to take its place."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        client: Client,
        providers: Mapping[str, Provider],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._client = client
        self._settings = settings.capacity
        self._providers = providers
        self._clock = clock
        patience_s = self._settings.interval_s / 2  # The next round finds it again.
        self._without_owner = {name: Suspects(patience_s) for name in providers}
        self._missing = {name: Suspects(patience_s) for name in providers}
        self._unattended = Suspects(settings.reconcile.disagree_s)

    async def run(self) -> None:
        """Rounds until cancelled, while this is the one that works."""
        await lead(self._engine, Leader.POOLS, "keeping pools", self.round, self._settings.interval_s)

    async def round(self) -> None:
        """One comparison of everything. A provider that does not answer is left out."""
        offers: list[Offer] = []
        for name, provider in self._providers.items():
            try:
                began_s = self._clock()
                found = await in_thread(provider.describe)
                differences = await in_thread(self._compare, provider, found, began_s)
                await in_thread(self._settle, name, provider, differences)
                offers += await in_thread(provider.offers)
            except ProviderUnavailable as error:
                _log.warning("provider %s: %s; trying again", name, error)
        await in_thread(self._end_away)
        await in_thread(self._size_pools, offers)
        await self._start_missing_workflows()
        for machine in await in_thread(self._machines_of_gone):
            await self._forget(machine)

    # ------------------------------------------------------------------------------------------ ledger and providers

    def _compare(self, provider: Provider, found: Sequence[Found], now_s: float) -> Differences:
        with transaction(self._engine) as session:
            rows = session.execute(
                select(InstanceRow.id, InstanceRow.native_id, func.extract("epoch", InstanceRow.launched_at)).where(
                    InstanceRow.provider == provider.name, InstanceRow.gone_at.is_(None)
                )
            )
            entries = {id_: Entry(native, None if at is None else float(at)) for id_, native, at in rows}
        return compare(entries, found, now_s, provider.lists_late_s)

    def _settle(self, name: str, provider: Provider, differences: Differences) -> None:
        """Ends what has no owner, and lets go of what is gone, if the round before has found the same."""
        owned: dict[str, Hashable] = {**differences.strays, **differences.seconds}
        for native_id in self._without_owner[name].due(owned):
            instance = str(owned[native_id])
            kind = "stray" if native_id in differences.strays else "second"
            _log.warning("%s has %s for %s, which nobody owns (%s): ended", name, native_id, instance, kind)
            provider.terminate(native_id)
            with transaction(self._engine) as session:
                detail = {"provider": name, "native_id": native_id, "instance": instance, "why": kind}
                events.record(session, "instance.without_owner", detail=detail)
            self._without_owner[name].clear(native_id)
        for instance in self._missing[name].due(dict.fromkeys(differences.missing)):
            reason = Reason(ReasonCode.NOT_AT_PROVIDER, {"provider": name, "instance": instance})
            with transaction(self._engine) as session:
                _lost(session, instance, reason)
            self._missing[name].clear(instance)

    def _end_away(self) -> None:
        """Instances whose agents have been away for too long: another one is launched in their place."""
        with transaction(self._engine) as session:
            away = select(InstanceRow.id, Machine.lost_at).join(Machine, Machine.id == InstanceRow.machine)
            rows = session.execute(
                away.where(
                    InstanceRow.gone_at.is_(None),
                    InstanceRow.lost_at.is_(None),
                    Machine.state == "lost",
                    Machine.lost_at < func.now() - timedelta(seconds=self._settings.lost_after_s),
                ).order_by(InstanceRow.id)
            ).all()
            for instance, since in rows:
                at = None if since is None else since.isoformat(timespec="seconds")
                _lost(session, instance, Reason(ReasonCode.AGENT_AWAY, {"since": at, "instance": instance}))

    # ---------------------------------------------------------------------------------------------------------- pools

    def _size_pools(self, offers: Sequence[Offer]) -> None:
        with transaction(self._engine) as session:
            refused = _refused(session, self._settings.refused_pause_s)
            rows = session.scalars(select(PoolRow).order_by(PoolRow.region, PoolRow.name).with_for_update()).all()
            pools = {(row.region, row.name): _pool(row) for row in rows}
            live = _live(session)
            # Pools that were removed have a size of none.
            for region, name in sorted({*pools, *live}):
                pool = pools.get((region, name)) or Pool(region, name, 0)
                reason = self._size(session, pool, live.get((region, name), []), offers, refused)
                for row in rows:
                    if (row.region, row.name) == (region, name) and row.reason != reason:
                        row.reason = reason
            _keep_prices(session, offers)

    def _size(
        self,
        session: Session,
        pool: Pool,
        instances: list[Instance],
        offers: Sequence[Offer],
        refused: Mapping[tuple[str, str, str, str], Reason],
    ) -> dict[str, Any] | None:
        """Launches and ends what the pool asks for; why it gets less, if it does."""
        wanted = changes(pool, instances, offers, refused)
        for offer in wanted.launch:
            request_instance(session, pool, offer)
        for instance in wanted.end:
            reason = Reason(ReasonCode.POOL_SHRINKS, {"pool": pool.name, "size": pool.size})
            tell_to_end(session, instance, reason)
        if not wanted.missing:
            return None
        if not wanted.offered:
            return Reason(ReasonCode.NO_OFFER, {"pool": pool.name, "region": pool.region}).to_json()
        (newest, *_) = (refused[offer.key] for offer in offers if pool.takes(offer) and offer.key in refused)
        return newest.to_json()

    # ------------------------------------------------------------------------------------------------------- Temporal

    async def _start_missing_workflows(self) -> None:
        """Instances without a workflow: Temporal has lost its state, or mail was set aside."""
        live = await in_thread(self._live_ids)
        if not live or (await self._client.count_workflows(_RUNNING)).count >= len(live):
            self._unattended.due({})
            return
        running = {execution.id async for execution in self._client.list_workflows(_RUNNING)}
        gone: dict[str, Hashable] = {i: None for i in live if ids.instance_workflow_id(i) not in running}
        for instance in self._unattended.due(gone):
            _log.warning("instance %s has no workflow: started anew", instance)
            await in_thread(self._tell, instance)
            self._unattended.clear(instance)

    def _live_ids(self) -> list[str]:
        with transaction(self._engine) as session:
            return list(session.scalars(select(InstanceRow.id).where(InstanceRow.gone_at.is_(None))))

    def _tell(self, instance: str) -> None:
        with transaction(self._engine) as session:
            outbox.instance(session, instance)

    # ------------------------------------------------------------------------------------------------------- machines

    def _machines_of_gone(self) -> list[str]:
        """Machines whose instance is gone, and on which nothing is held."""
        held = select(Allocation.workload).where(Allocation.machine == Machine.id, Allocation.released_at.is_(None))
        gone = select(Machine.id).join(InstanceRow, InstanceRow.machine == Machine.id)
        with transaction(self._engine) as session:
            return list(session.scalars(gone.where(InstanceRow.gone_at.is_not(None), ~held.exists())))

    async def _forget(self, machine: str) -> None:
        """Its history of allocations stays."""
        try:
            workflow = self._client.get_workflow_handle(ids.machine_workflow_id(machine))
            await workflow.terminate(reason="its instance is gone")
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
        await in_thread(self._delete, machine)

    def _delete(self, machine: str) -> None:
        with transaction(self._engine) as session:
            row = session.get(Machine, machine, with_for_update=True)
            held = select(Allocation.workload).where(Allocation.machine == machine, Allocation.released_at.is_(None))
            if row is None or session.scalar(held.limit(1)) is not None:
                return
            session.execute(delete(Machine).where(Machine.id == machine))
            events.record(session, "machine.removed", region=row.region, machine=machine, detail={"by": "mizzen"})
            outbox.wake_scheduler(session)


def request_instance(session: Session, pool: Pool, offer: Offer) -> str:
    """Writes a new instance of an offer into the ledger, and has its workflow started at the commit; returns its id."""
    cluster = cluster_of(pool.name, offer)
    keep_cluster(session, offer.region, cluster, offer)
    row = InstanceRow(
        id=ids.new_instance_id(), region=offer.region, pool=pool.name, cluster=cluster, provider=offer.provider,
        zone=offer.zone, kind=offer.kind.value, machine_type=offer.shape.machine_type, gpus=offer.shape.gpus,
        gpu_type=offer.shape.gpu_type, cpus_milli=offer.shape.cpus_milli, memory_bytes=offer.shape.memory_bytes,
        usd_per_h=offer.usd_per_h, expected_at=func.now() + timedelta(seconds=offer.start_s),
    )  # fmt: skip
    session.add(row)
    session.flush()
    outbox.instance(session, row.id)
    return row.id


def tell_to_end(session: Session, instance: str, reason: Reason) -> bool:
    """Writes why an instance is to end, and tells its workflow; False: it is to end already, or is gone."""
    row = session.get(InstanceRow, instance, with_for_update=True)
    if row is None or row.ending is not None or row.gone_at is not None:
        return False
    row.ending = reason.to_json()
    outbox.instance(session, instance)
    return True


def _lost(session: Session, instance: str, reason: Reason) -> None:
    row = session.get(InstanceRow, instance, with_for_update=True)
    if row is None or row.lost_at is not None or row.gone_at is not None:
        return
    row.lost_at, row.ending = func.now(), row.ending or reason.to_json()
    outbox.instance(session, instance)


def _refused(session: Session, pause_s: float) -> dict[tuple[str, str, str, str], Reason]:
    """Offers that were refused so lately that they are not asked now, by their keys, with the newest words."""
    recent = LaunchRefusal.at > text("now() - make_interval(secs => :s)").bindparams(s=pause_s)
    rows = session.scalars(select(LaunchRefusal).where(recent).order_by(LaunchRefusal.at))
    return {(row.provider, row.zone, row.kind, row.machine_type): refusal_reason(row) for row in rows}


def _live(session: Session) -> dict[tuple[str, str], list[Instance]]:
    """Instances that are not gone, by region and pool."""
    busy = (
        select(Allocation.workload)
        .where(Allocation.machine == InstanceRow.machine, Allocation.released_at.is_(None))
        .exists()
    )
    # One that is to end is not had any more, whatever it shows until its workflow has looked; nor is one that its
    # platform takes: the next one is launched while tasks still save there.
    rows = session.execute(
        select(InstanceRow.region, InstanceRow.pool, InstanceRow.id, InstanceRow.phase, busy)
        .outerjoin(Machine, Machine.id == InstanceRow.machine)
        .where(InstanceRow.gone_at.is_(None), InstanceRow.ending.is_(None), Machine.notice.is_(None))
        .order_by(InstanceRow.id)
    )
    out: dict[tuple[str, str], list[Instance]] = {}
    for region, pool, id_, phase, is_busy in rows:
        out.setdefault((region, pool), []).append(Instance(id_, InstancePhase(phase), is_busy))
    return out


def _pool(row: PoolRow) -> Pool:
    return Pool(
        row.region, row.name, row.size, tuple(row.providers), tuple(row.zones),
        tuple(CapacityKind(kind) for kind in row.kinds), tuple(row.machine_types), row.max_usd_per_h,
    )  # fmt: skip


def _keep_prices(session: Session, offers: Sequence[Offer]) -> None:
    """The prices of clusters with live instances follow the offers."""
    rows = session.execute(
        select(
            InstanceRow.region, InstanceRow.cluster, InstanceRow.provider, InstanceRow.zone, InstanceRow.kind,
            InstanceRow.machine_type,
        )
        .where(InstanceRow.gone_at.is_(None))
        .distinct()
    )  # fmt: skip
    by_key = {(offer.region, *offer.key): offer for offer in offers}
    for region, cluster, provider, zone, kind, machine_type in rows:
        if (offer := by_key.get((region, provider, zone, kind, machine_type))) is not None:
            keep_cluster(session, region, cluster, offer)
