"""A region's bids: its answer to each workload of a batch, against one snapshot (MAST 4.3)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import TypeAdapter
from sqlalchemy import Engine, select
from sqlalchemy.dialects.postgresql import insert
from temporalio import activity

import rms.bid
from activities import snapshots
from domain.protocol import Activity, BidRequest
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, PlacementRequest
from domain.spec import WorkloadSpec
from infra.config import Settings
from infra.db.models import RegionBid, Workload
from infra.db.session import transaction
from rms.gang import Planner
from rms.region import Region

BID = TypeAdapter(Bid)
"""A bid to and from JSON."""


def region_bid(
    planner: Planner,
    spec: WorkloadSpec,
    request: PlacementRequest,
    replicas: Mapping[str, frozenset[str]],
    *,
    ignore_data: bool = False,
) -> Bid:
    """One region's answer for one workload: whether it may run there, the data is there, and a plan (MAST 4.3)."""
    region = planner.region
    name = region.name
    if not spec.allows_region(name):
        return Bid(request.workload, name, None, (Reason(ReasonCode.REGION_EXCLUDED, {"region": name}),))
    answer = rms.bid.bid_in(planner, request)
    missing = sorted(t for t in spec.tables if name not in replicas[t])
    if missing and not ignore_data:
        no_hardware = tuple(r for r in answer.reasons if r.code is ReasonCode.NO_HARDWARE)
        absent = tuple(Reason(ReasonCode.DATA_NOT_HERE, {"region": name, "table": t}) for t in missing)
        return Bid(request.workload, name, None, (*no_hardware, *absent))
    if answer.plan is None:
        return answer
    victims = {victim: region.workload(victim).attempt for victim in answer.plan.victims}
    return replace(answer, victim_attempts=victims)


class Bidder:
    """A region's RMS: bids on the state of this moment."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def bids(
        self, region: str, workloads: Sequence[str], queue: snapshots.PublishedQueue, *, ignore_data: bool = False
    ) -> list[Bid]:
        """One region's answers, each workload against the same snapshot; none for one that is not there any more."""
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            snapshot = snapshots.region_snapshot(session, region, queue.placed, self._settings.scheduler)
            rows = session.execute(select(Workload.id, Workload.spec).where(Workload.id.in_(workloads)))
            specs = {id_: WorkloadSpec.model_validate(spec) for id_, spec in rows}
            evictors = snapshots.evictors(session, specs)
            replicas = snapshots.ready_replicas(session, {t for spec in specs.values() for t in spec.tables})
        planner = Planner(Region.of(snapshot))
        asked = ((w, snapshots.placement_request(w, queue.items.get(w), s, evictors[w])) for w, s in specs.items())
        return [region_bid(planner, specs[w], request, replicas, ignore_data=ignore_data) for w, request in asked]


class RegionActivities:
    """What a region's RMS processes do in an auction. They touch nothing but their own bids."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._bidder = Bidder(engine, settings)

    @activity.defn(name=Activity.BID.value)
    def bid(self, request: BidRequest) -> int:
        """Bids on a batch, each workload against the same snapshot; the number of plans found."""
        with transaction(self._engine) as session:
            queue = snapshots.published_queue(session)
        bids = self._bidder.bids(request.region, request.workloads, queue)
        rows = [
            {"scan": request.scan, "region": b.region, "workload": b.workload, "body": json.loads(BID.dump_json(b))}
            for b in bids
        ]
        if rows:
            with transaction(self._engine) as session:
                session.execute(insert(RegionBid).on_conflict_do_nothing(), rows)
        return sum(b.plan is not None for b in bids)
