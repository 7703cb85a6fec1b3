"""Sizing pools: requests the instances that a pool lacks, and tells surplus instances to end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from activities.capacity.clusters import make_cluster, set_prices
from activities.capacity.refusals import refusal_reason
from activities.capacity.shortages import read_shortages
from capacity.offers import Offer
from capacity.pools import Instance, Pool, changes, cluster_of
from capacity.scaling import Idle, OfferKey, PoolKey, grow, shrink
from domain import ids
from domain.capacity import CapacityKind
from domain.reasons import Reason, ReasonCode
from infra.config import Settings
from infra.db import outbox, published
from infra.db.capacity import InstanceRow, LaunchRefusal, PoolRow
from infra.db.models import Allocation, Machine
from infra.db.session import transaction
from lifecycle.instances import InstancePhase


@dataclass(frozen=True)
class _Live:
    """An instance that is not gone, and is not to end."""

    instance: Instance
    offer: OfferKey
    usable: bool
    """It is on its way, or its machine takes work."""
    idle_s: float | None
    """For how long it has had no work; None: it has, or is not ready."""
    wanted_by: str | None


class Pools:
    """Sizes all pools, round by round."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings.capacity
        self._queue = published.Newest()

    def round(self, offers: Sequence[Offer]) -> None:
        """What all pools lack and have too much of, in one transaction; `offers` are of all providers that answer."""
        with transaction(self._engine) as session:
            refused = _refused(session, self._settings.refused_pause_s)
            rows = session.scalars(select(PoolRow).order_by(PoolRow.region, PoolRow.name).with_for_update()).all()
            live = _live(session)
            pools = {(row.region, row.name): _pool(row) for row in rows}
            # A pool that was removed counts as one of size 0, so its instances are told to end.
            every = pools | {key: Pool(*key, 0) for key in live.keys() - pools.keys()}
            reasons = {key: self._size(session, pool, live, offers, refused) for key, pool in sorted(every.items())}
            for row in rows:
                if row.reason != reasons[row.region, row.name]:
                    row.reason = reasons[row.region, row.name]
            if any(pool.max_size is not None for pool in every.values()):
                self._follow_queue(session, every, live, offers, refused)
            _keep_prices(session, offers)

    def _size(
        self,
        session: Session,
        pool: Pool,
        live: dict[PoolKey, list[_Live]],
        offers: Sequence[Offer],
        refused: Mapping[OfferKey, Reason],
    ) -> dict[str, Any] | None:
        """Launches what is missing and ends what is too much; why the pool gets less than its size, if it does."""
        here = live.setdefault((pool.region, pool.name), [])
        wanted = changes(pool, [one.instance for one in here], offers, refused)
        for offer in wanted.launch:
            here.append(_requested(session, pool, offer))
        for instance in wanted.end:
            tell_to_end(session, instance, Reason(ReasonCode.POOL_SHRINKS, {"pool": pool.name, "size": pool.size}))
        here[:] = [one for one in here if one.instance.id not in wanted.end]
        if not wanted.missing:
            return None
        if not wanted.offered:
            return Reason(ReasonCode.NO_OFFER, {"pool": pool.name, "region": pool.region}).to_json()
        (newest, *_) = (refused[offer.key] for offer in offers if pool.takes(offer) and offer.key in refused)
        return newest.to_json()

    def _follow_queue(
        self,
        session: Session,
        pools: Mapping[PoolKey, Pool],
        live: Mapping[PoolKey, list[_Live]],
        offers: Sequence[Offer],
        refused: Mapping[OfferKey, Reason],
    ) -> None:
        """Launches for what waits, and ends what has been idle for long."""
        idle = [
            Idle(one.instance.id, key, one.offer)
            for key, all_ in live.items()
            for one in all_
            if one.usable and not one.instance.busy
        ]
        had = {key: len(all_) for key, all_ in live.items()}
        growth = grow(pools, had, read_shortages(session, self._queue), idle, offers, refused)
        for one in (one for all_ in live.values() for one in all_):
            if growth.wanted_by.get(one.instance.id) != one.wanted_by:
                row = session.get_one(InstanceRow, one.instance.id)
                row.wanted_by = growth.wanted_by.get(one.instance.id)
        for key, launches in growth.launch.items():
            for offer, workload in launches:
                _requested(session, pools[key], offer, workload)
        for key, pool in pools.items():
            if pool.max_size is None or key in growth.launch:
                continue
            idle_s = {one.instance.id: one.idle_s for one in live[key] if one.idle_s is not None}
            for instance in shrink(pool, had[key], idle_s, growth.wanted_by):
                reason = Reason(ReasonCode.IDLE, {"pool": pool.name, "idle_s": round(idle_s[instance])})
                tell_to_end(session, instance, reason)


def _requested(session: Session, pool: Pool, offer: Offer, wanted_by: str | None = None) -> _Live:
    instance = request_instance(session, pool, offer, wanted_by)
    return _Live(Instance(instance, InstancePhase.REQUESTED, busy=False), offer.key, True, None, wanted_by)


def request_instance(session: Session, pool: Pool, offer: Offer, wanted_by: str | None = None) -> str:
    """Writes a new instance of an offer into the ledger, and has its workflow started at the commit; returns its id."""
    cluster = cluster_of(pool.name, offer)
    make_cluster(session, offer.region, cluster, offer)
    row = InstanceRow(
        id=ids.new_instance_id(), region=offer.region, pool=pool.name, cluster=cluster, provider=offer.provider,
        zone=offer.zone, kind=offer.kind.value, machine_type=offer.shape.machine_type, gpus=offer.shape.gpus,
        gpu_type=offer.shape.gpu_type, cpus_milli=offer.shape.cpus_milli, memory_bytes=offer.shape.memory_bytes,
        usd_per_h=offer.usd_per_h, wanted_by=wanted_by, expected_at=func.now() + timedelta(seconds=offer.start_s),
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


def _refused(session: Session, pause_s: float) -> dict[tuple[str, str, str, str], Reason]:
    """Offers that were refused so lately that they are not asked now, by their keys, with the newest words."""
    recent = LaunchRefusal.at > text("now() - make_interval(secs => :s)").bindparams(s=pause_s)
    rows = session.scalars(select(LaunchRefusal).where(recent).order_by(LaunchRefusal.at))
    return {(row.provider, row.zone, row.kind, row.machine_type): refusal_reason(row) for row in rows}


def _live(session: Session) -> dict[PoolKey, list[_Live]]:
    """Instances that are not gone and not to end, by region and pool; notes since when each has had no work.

    One whose platform takes it is to end from now on: when tasks have saved there it is of no use, and the next one is
    launched meanwhile.
    """
    here = Allocation.machine == InstanceRow.machine
    busy = select(Allocation.workload).where(here, Allocation.released_at.is_(None)).exists()
    rows = session.execute(
        select(InstanceRow, Machine, busy, func.extract("epoch", func.now() - InstanceRow.idle_since))
        .outerjoin(Machine, Machine.id == InstanceRow.machine)
        .where(InstanceRow.gone_at.is_(None), InstanceRow.ending.is_(None))
        .order_by(InstanceRow.id)
    ).all()
    out: dict[PoolKey, list[_Live]] = {}
    for row, machine, is_busy, idle_s in rows:
        if machine is not None and machine.notice is not None:
            tell_to_end(session, row.id, Reason.from_json(machine.notice))
            continue
        is_ready = row.phase == InstancePhase.READY
        if (row.idle_since is None) == (is_ready and not is_busy):
            row.idle_since = func.now() if row.idle_since is None else None
        idle = float(idle_s) if idle_s is not None and is_ready and not is_busy else None
        takes_work = machine is not None and machine.state == "ready" and not (machine.cordon or machine.draining)
        instance = Instance(row.id, InstancePhase(row.phase), is_busy)
        offer = row.provider, row.zone, row.kind, row.machine_type
        live = _Live(instance, offer, takes_work or not is_ready, idle, row.wanted_by)
        out.setdefault((row.region, row.pool), []).append(live)
    return out


def _pool(row: PoolRow) -> Pool:
    return Pool(
        row.region, row.name, row.size, tuple(row.providers), tuple(row.zones),
        tuple(CapacityKind(kind) for kind in row.kinds), tuple(row.machine_types), row.max_usd_per_h,
        row.max_size, row.idle_s,
    )  # fmt: skip


def _keep_prices(session: Session, offers: Sequence[Offer]) -> None:
    """The prices of clusters with live instances follow the offers; of machines of one GPU type the dearest counts."""
    session.flush()
    rows = session.execute(
        select(
            InstanceRow.region, InstanceRow.cluster, InstanceRow.provider, InstanceRow.zone, InstanceRow.kind,
            InstanceRow.machine_type,
        )
        .where(InstanceRow.gone_at.is_(None))
        .distinct()
    )  # fmt: skip
    by_key = {(offer.region, *offer.key): offer for offer in offers}
    found: dict[tuple[str, str], list[Offer]] = {}
    for region, cluster, provider, zone, kind, machine_type in rows:
        if (offer := by_key.get((region, provider, zone, kind, machine_type))) is not None:
            found.setdefault((region, cluster), []).append(offer)
    for (region, cluster), own in sorted(found.items()):
        set_prices(session, region, cluster, own)
