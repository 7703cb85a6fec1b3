"""A region's bids: its answer to each workload of a batch, against one state of its columns (MAST 4.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter
from sqlalchemy import Engine, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from temporalio import activity

import rms.bid
from activities.held import Held
from activities.order import Entry, batch
from domain.ask import Ask, ask_of
from domain.phases import QUEUED_PHASES
from domain.protocol import Activity, BidRequest
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, PlacementRequest, Plan
from infra.db.models import RegionBid, Replica
from infra.db.session import transaction
from rms.gang import Planner

BIDS = TypeAdapter(list[Bid])
"""Bids to and from JSON."""


# Arrays, not lists of parameters: the statement is the same for every batch.
_ASKS = text(
    "select id, ask from workload"
    " where id = any(:ids) and phase = any(:phases) and finished_at is null and held_by is null"
)
_EVICTORS = text("select victim, evictor from eviction where victim = any(:ids)")


@dataclass(frozen=True)
class Asked:
    """One workload of a batch as regions are asked about it."""

    entry: Entry
    ask: Ask
    request: PlacementRequest
    replicas: Mapping[str, frozenset[str]]
    """For each of its tables, the regions that have a complete replica."""


def asked(session: Session, entries: Sequence[Entry]) -> list[Asked]:
    """The entries that are still queued and that nobody holds, in the same order, with what Postgres says of them."""
    if not entries:
        return []
    rows = session.execute(_ASKS, {"ids": [e.workload for e in entries], "phases": sorted(QUEUED_PHASES)})
    asks = {workload: ask_of(ask) for workload, ask in rows}
    enemies = evictors(session, asks)
    replicas = ready_replicas(session, {t for ask in asks.values() for t in ask.tables})
    return [
        Asked(e, asks[e.workload], placement_request(e, asks[e.workload], enemies[e.workload]), replicas)
        for e in entries
        if e.workload in asks
    ]


def placement_request(entry: Entry, ask: Ask, enemies: frozenset[str] = frozenset()) -> PlacementRequest:
    """A queued workload as a region's RMS takes it: its rank and eligible GPU types as the scan found them.

    `enemies` are those that evicted it before.
    """
    jobs = ask.jobs
    if entry.gpu_types is not None:
        jobs = tuple(replace(job, gpu_types=t) for job, t in zip(jobs, entry.gpu_types, strict=True))
    return PlacementRequest(entry.workload, entry.rank, jobs, enemies)


def evictors(session: Session, workloads: Mapping[str, object] | Sequence[str]) -> dict[str, frozenset[str]]:
    """For each of `workloads`, those that evicted it before."""
    out: dict[str, set[str]] = {workload: set() for workload in workloads}
    for victim, evictor in session.execute(_EVICTORS, {"ids": list(out)}):
        out[victim].add(evictor)
    return {workload: frozenset(found) for workload, found in out.items()}


def ready_replicas(session: Session, tables: set[str] | Sequence[str]) -> dict[str, frozenset[str]]:
    """For each of `tables`, the regions that have a complete replica."""
    out: dict[str, set[str]] = {table: set() for table in tables}
    if out:
        for table, region in session.execute(
            select(Replica.data_table, Replica.region).where(
                Replica.data_table.in_(sorted(out)), Replica.state == "ready"
            )
        ):
            out[table].add(region)
    return {table: frozenset(regions) for table, regions in out.items()}


def region_bid(planner: Planner, asked: Asked, *, ignore_data: bool = False) -> Bid:
    """One region's answer for one workload: whether it may run there, the data is there, and a plan (MAST 4.3)."""
    region, request = planner.region, asked.request
    name = region.name
    if not asked.ask.allows_region(name):
        return Bid(request.workload, name, None, (Reason(ReasonCode.REGION_EXCLUDED, {"region": name}),))
    answer = rms.bid.bid_in(planner, request)
    missing = sorted(t for t in asked.ask.tables if name not in asked.replicas[t])
    if missing and not ignore_data:
        no_hardware = tuple(r for r in answer.reasons if r.code is ReasonCode.NO_HARDWARE)
        absent = tuple(Reason(ReasonCode.DATA_NOT_HERE, {"region": name, "table": t}) for t in missing)
        return Bid(request.workload, name, None, (*no_hardware, *absent))
    if answer.plan is None:
        return answer
    victims = {victim: region.workload(victim).attempt for victim in answer.plan.victims}
    return replace(answer, victim_attempts=victims)


def bids_on(planner: Planner, batch: Sequence[Asked]) -> list[Bid]:
    """A region's answers to a batch, each against the same state: those who ask the same get the same answer."""
    known: dict[object, Bid] = {}
    out = []
    for a in batch:
        key = a.ask, a.request.jobs, a.request.rank, a.request.may_not_evict
        answer = known.get(key)
        if answer is None:
            answer = known[key] = region_bid(planner, a)
        else:
            own, plan = a.request.workload, answer.plan
            if plan is not None:
                plan = Plan(own, plan.region, plan.jobs, plan.victims, plan.quality)
            answer = Bid(own, answer.region, plan, answer.reasons, answer.victim_attempts)
        out.append(answer)
    return out


class RegionActivities:
    """What a region's RMS processes do in an auction. They touch nothing but their own bids."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine = engine
        self._held = held

    @activity.defn(name=Activity.BID.value)
    def bid(self, request: BidRequest) -> int:
        """Bids on a batch, each workload against the same state; the number of plans found."""
        with transaction(self._engine) as session:
            wanted = asked(session, batch(session, request.scan, request.first))
        with self._held.current() as held:
            if request.region not in held.regions:
                return 0
            bids = bids_on(held.planner(request.region), wanted)
        row = {"scan": request.scan, "first": request.first, "region": request.region}
        with transaction(self._engine) as session:
            found = insert(RegionBid).values(**row, bids=BIDS.dump_json(bids))
            session.execute(found.on_conflict_do_nothing())
        return sum(b.plan is not None for b in bids)


def region_bids(session: Session, scan: int, first: int) -> dict[str, list[Bid]]:
    """What regions bid on a batch, by region."""
    rows = session.execute(
        select(RegionBid.region, RegionBid.bids).where(RegionBid.scan == scan, RegionBid.first == first)
    )
    return {region: BIDS.validate_json(bids) for region, bids in rows}
