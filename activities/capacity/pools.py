"""Sizing of pools: finds the workloads that wait only for machines, requests the instances that a pool lacks,
and ends surplus instances.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sqlalchemy import Engine, Label, func, literal_column, select
from sqlalchemy.orm import Session

from activities.capacity.clusters import make_cluster, set_prices
from activities.capacity.ledger import add_instance, recently_refused, record_refusal, request_end
from activities.scheduling.scan_result import read_window
from capacity.offers import Offer, OfferKey, Shape
from capacity.pools import Changes, Instance, Pool, PoolKey, cluster_of
from capacity.provider import LaunchRefused, Refusal
from capacity.scaling import MOST_SHORTAGES, Claims, Shortage
from capacity.sizing_round import plan_round
from domain.capacity import CapacityKind
from domain.demand import demand_of
from domain.lifecycle.instances import InstancePhase
from domain.phases import QUEUED_PHASES
from domain.reasons import Reason, ReasonCode
from domain.shortage import short_regions
from infra.config.settings import Settings
from infra.db import published_queue
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.logs import Waiting
from infra.db.models import Allocation, Machine, Workload
from infra.db.session import transaction


class Pools:
    """Sizes all pools in rounds."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings.capacity
        self._queue = published_queue.Newest()

    def round(
        self,
        offers: Sequence[Offer],
        silent: Sequence[tuple[Offer, str]] = (),
        impaired: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Sizes all pools in one transaction.

        `offers` are the offers of all providers that answer. `silent` are those of the others, with the errors.
        `impaired`: by name of the provider, what fails although it answers (`Provider.impaired`).
        """
        with transaction(self._engine) as session:
            refused = recently_refused(session, self._settings.refused_pause_s)
            rows = session.scalars(select(PoolRow).order_by(PoolRow.region, PoolRow.name).with_for_update()).all()
            instances = _instances(session)
            pools = {(row.region, row.name): _pool(row, self._settings.hold_s) for row in rows}
            grows = any(pool.max_size is not None for pool in pools.values())
            shortages = read_shortages(session, self._queue) if grows else []
            todo = plan_round(pools, instances, shortages, offers, refused)
            for row in rows:
                pool = pools[row.region, row.name]
                reason = _reason(pool, todo.lacks.get(pool.key), offers, refused, silent, impaired)
                if row.reason != reason:
                    row.reason = reason
            for one in (one for all_ in instances.values() for one in all_):
                claims = todo.claims.get(one.id, {})
                if claims != one.claims:
                    session.get_one(InstanceRow, one.id).wanted_by = _claims_to_json(claims)
            for key, launches in todo.launch.items():
                for launch in launches:
                    request_instance(session, pools[key], launch.offer, launch.claims)
            offered = {one.id: one.offer for all_ in instances.values() for one in all_}
            for instance, why in todo.end.items():
                request_end(session, instance, why)
                if why.code is ReasonCode.GANG_INCOMPLETE:
                    # Counts as a refusal: other offers are tried first, because machines of this one would wait again.
                    incomplete = LaunchRefused(Refusal.CAPACITY, why.sentence)
                    record_refusal(session, instance, offered[instance], incomplete)
            _keep_prices(session, offers)


def _reason(
    pool: Pool,
    lacks: Changes | None,
    offers: Sequence[Offer],
    refused: Mapping[OfferKey, Reason],
    silent: Sequence[tuple[Offer, str]],
    impaired: Mapping[str, str],
) -> dict[str, Any] | None:
    """Returns why a pool stays below its size or buffer, cannot grow, or may not see its machines end; else None."""
    fitting = [offer for offer in offers if pool.takes(offer)]
    refusals = [refused[offer.key] for offer in fitting if offer.key in refused]
    if pool.most and not fitting:
        for offer, words in silent:
            if pool.takes(offer):
                detail = {"pool": pool.name, "region": pool.region, "provider": offer.provider, "words": words}
                return Reason(ReasonCode.PROVIDER_SILENT, detail).to_json()
    cannot_grow = pool.max_size is not None and len(refusals) == len(fitting) > 0
    if lacks is None and not cannot_grow:
        for offer in fitting:
            if pool.most and (lacking := impaired.get(offer.provider)):
                detail = {"pool": pool.name, "region": pool.region, "provider": offer.provider, "words": lacking}
                return Reason(ReasonCode.PROVIDER_IMPAIRED, detail).to_json()
        return None
    if lacks is not None and not lacks.offered:
        return Reason(ReasonCode.NO_OFFER, {"pool": pool.name, "region": pool.region}).to_json()
    return refusals[0].to_json()


def request_instance(session: Session, pool: Pool, offer: Offer, claims: Claims | None = None) -> str:
    """Writes a new instance of an offer into the ledger, with the message that starts its workflow; returns its id."""
    cluster = cluster_of(pool.name, offer)
    make_cluster(session, offer.region, cluster, offer)
    return add_instance(session, offer, pool.name, cluster, wanted_by=_claims_to_json(claims or {}))


def _claims_to_json(claims: Claims) -> dict[str, list[int]]:
    return {workload: list(tasks) for workload, tasks in claims.items()}


def _claims_of(body: Mapping[str, Sequence[int]]) -> Claims:
    return {workload: tuple(tasks) for workload, tasks in body.items()}


def _instances(session: Session) -> dict[PoolKey, list[Instance]]:
    """Returns the instances that are to stay, by region and pool, and updates `idle_since` of each.

    An instance that its platform reclaims is marked to end here, so that its replacement is launched while its tasks
    save.
    """
    here = Allocation.machine == InstanceRow.machine
    busy = select(Allocation.workload).where(here, Allocation.released_at.is_(None)).exists()
    rows = session.execute(
        select(InstanceRow, Machine, busy, func.extract("epoch", func.now() - InstanceRow.idle_since))
        .outerjoin(Machine, Machine.id == InstanceRow.machine)
        .where(InstanceRow.gone_at.is_(None), InstanceRow.ending.is_(None), InstanceRow.workload.is_(None))
        .order_by(InstanceRow.id)
    ).all()
    out: dict[PoolKey, list[Instance]] = {}
    for row, machine, is_busy, idle_s in rows:
        if machine is not None and machine.notice is not None:
            request_end(session, row.id, Reason.from_json(machine.notice))
            continue
        is_ready = row.phase == InstancePhase.READY
        if (row.idle_since is None) == (is_ready and not is_busy):
            row.idle_since = func.now() if row.idle_since is None else None
        idle = float(idle_s) if idle_s is not None and is_ready and not is_busy else None
        takes_work = machine is not None and machine.state == "ready" and not (machine.cordon or machine.draining)
        shape = Shape(row.machine_type, row.gpus, row.gpu_type, row.cpus_milli, row.memory_bytes)
        kind = CapacityKind(row.kind)
        offer = Offer(row.provider, row.region, row.zone, kind, shape, row.usd_per_h, start_s=0.0)
        instance = Instance(
            row.id,
            InstancePhase(row.phase),
            is_busy,
            offer,
            takes_work or not is_ready,
            idle,
            _claims_of(row.wanted_by),
        )
        out.setdefault((row.region, row.pool), []).append(instance)
    return out


def _pool(row: PoolRow, hold_s: float) -> Pool:
    return Pool(
        row.region, row.name, row.size, tuple(row.providers), tuple(row.zones),
        tuple(CapacityKind(kind) for kind in row.kinds), tuple(row.machine_types), row.max_usd_per_h,
        row.max_size, row.idle_s, hold_s, row.buffer, frozenset(row.tenants),
    )  # fmt: skip


def _keep_prices(session: Session, offers: Sequence[Offer]) -> None:
    """Updates the prices of clusters with live instances from the offers. For each GPU type, the highest is used."""
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


_WINDOW: Label[str | None] = literal_column(
    f"(select array_window(a, {MOST_SHORTAGES}) from workload_array as a where a.id = workload.id)"
).label("window")


def read_shortages(session: Session, queue: published_queue.Newest) -> list[Shortage]:
    """Returns the workloads for which no region has room, in queue order.

    Of an array, the elements that wait are listed. Workloads that are held or over-quota are left out. A region is
    listed only if it lacks nothing but machines: a region that does not answer, or that lacks the workload's data, is
    left out.
    """
    newest = queue.load(session)
    rows = session.execute(
        select(Workload.id, Workload.tenant, Workload.ask, Waiting.reasons, _WINDOW)
        .join(Waiting, Waiting.workload == Workload.id)
        .where(Workload.phase.in_(sorted(QUEUED_PHASES)), Workload.finished_at.is_(None), Workload.held_by.is_(None))
    ).all()
    entries = newest.find_all([row.id for row in rows])
    ranked = sorted(
        (entries[row.id].position, row) for row in rows if row.id in entries and not entries[row.id].over_quota
    )
    out = []
    for _, row in ranked[:MOST_SHORTAGES]:
        regions = short_regions(row.reasons.get("reasons", ()))
        if regions and row.ask is not None:
            jobs = demand_of(row.ask).jobs
            ids = [row.id] if row.window is None else [one.id for one in read_window(row.id, row.window).waiting]
            out += [Shortage(id_, jobs, regions, row.tenant) for id_ in ids]
    return out[:MOST_SHORTAGES]
