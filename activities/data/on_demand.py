"""On-demand copies of tables to a region with the hardware, if no region has both hardware and data (MAST 3.1, 4.3)."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from domain.demand import WorkloadDemand
from domain.instance import HIGH_PRIORITY
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid
from infra.db.catalogue import NoRoom, can_read, no_room, ready_replicas, want_replica, whole_bytes
from infra.db.models import Workload
from infra.db.tables import Replica, Table

_NOT_ABOUT_DATA = frozenset(
    {
        ReasonCode.NO_HARDWARE,
        ReasonCode.REGION_EXCLUDED,
        ReasonCode.REGION_SILENT,
        ReasonCode.BUCKET_UNAVAILABLE,
    }
)
_ABOUT_DATA = frozenset({ReasonCode.DATA_NOT_HERE, ReasonCode.DATA_STALE})


def targets(answers: Iterable[Bid]) -> list[str]:
    """Returns the regions to which copying a workload's tables would help.

    If at least one region has the hardware but not the data, and no region has both, all regions that answered are
    returned. Otherwise the regions are returned whose only problem is a stale replica: they lack recent appends only.
    """
    codes = {bid.region: {r.code for r in bid.reasons} for bid in answers}
    if any(c & _ABOUT_DATA and not c & _NOT_ABOUT_DATA for c in codes.values()) and all(
        c & (_NOT_ABOUT_DATA | _ABOUT_DATA) for c in codes.values()
    ):
        return sorted(codes)
    return sorted(region for region, c in codes.items() if c == {ReasonCode.DATA_STALE})


def may_be_placed_later(session: Session, demand: WorkloadDemand, level: int, unreachable: Iterable[str]) -> bool:
    """Returns whether a region that did not answer has the workload's tables. Such a region may have free resources."""
    replicas = ready_replicas(session, demand.tables)
    return any(demand.allows_region(r) and can_read(replicas, demand.tables, r, level=level) for r in unreachable)


def is_on_its_way(session: Session, workload: str, tables: Collection[str]) -> bool:
    """Returns whether a copy that was started for this workload is still running."""
    return any(_for(r) == workload for r in _copying(session, tables))


def bring_data(
    session: Session, workload: Workload, demand: WorkloadDemand, level: int, offers: Sequence[Bid]
) -> list[Reason]:
    """Starts copies of a workload's missing tables to the region that could start the workload soonest, only once.

    `offers` are the regions' answers on the assumption that the data is there. Preferred are regions to which all
    missing tables are already being copied, then the best plan by the order of criteria. If no region has a plan, the
    region that can place the most tasks is chosen. Regions without storage for the tables are left out. A stale replica
    counts as complete for workloads that may read stale data. Returns the reasons: the copies in progress or, if no
    region has storage, the missing storage.
    """
    copying = _copying(session, demand.tables)
    for region in sorted({r.region for r in copying if _for(r) == workload.id}):
        return [_progress(session, r) for r in copying if r.region == region]
    able = []
    full: list[Reason] = []
    for bid in offers:
        if {r.code for r in bid.reasons} & _NOT_ABOUT_DATA:
            continue
        short = no_room(session, bid.region, whole_bytes(session, demand.tables, bid.region))
        if short is None:
            able.append(bid)
        else:
            full.append(_no_storage(short))
    if not able:
        return full
    there: dict[str, set[str]] = defaultdict(set)
    coming = Replica.data_table.in_(demand.tables), Replica.state != "deleting", Replica.whole
    for replica in session.scalars(select(Replica).where(*coming)):
        there[replica.region].add(replica.data_table)
    target = min(able, key=lambda b: (not there[b.region].issuperset(demand.tables), _soonest(b))).region
    short = no_room(session, target, whole_bytes(session, demand.tables, target), lock=True)
    if short is not None:  # Another workload has taken the storage since the check above.
        return [_no_storage(short)]
    out = []
    for table in sorted(demand.tables):
        row = want_replica(session, table, target, fresh=level <= HIGH_PRIORITY, workload=workload)
        if row is None:
            out.append(Reason(ReasonCode.DATA_NOWHERE, {"table": table}))
        elif row.state == "copying" or row.topping_up:
            out.append(_progress(session, row))
    return out


def _no_storage(short: NoRoom) -> Reason:
    return Reason(ReasonCode.NO_STORAGE, asdict(short))


def _copying(session: Session, tables: Collection[str]) -> Sequence[Replica]:
    return session.scalars(
        select(Replica)
        .where(Replica.data_table.in_(tables), or_(Replica.state == "copying", Replica.topping_up))
        .where(Replica.state != "deleting")
        .order_by(Replica.data_table, Replica.region)
    ).all()


def _for(replica: Replica) -> str | None:
    """Returns the workload for which the replica is being copied or refreshed."""
    return replica.requested_by if replica.state == "copying" else replica.topped_up_for


def _soonest(bid: Bid) -> tuple[object, ...]:
    if bid.plan is not None:
        return (0, bid.plan.key)
    short = [r for r in bid.reasons if r.code is ReasonCode.INSUFFICIENT_CAPACITY]
    lacking = sum(int(str(r.detail.get("tasks", 0))) - int(str(r.detail.get("placeable", 0))) for r in short)
    return (1, (lacking, bid.region))


def _progress(session: Session, replica: Replica) -> Reason:
    total = session.get_one(Table, replica.data_table).size_bytes
    detail = {
        "table": replica.data_table,
        "region": replica.region,
        "done_bytes": replica.done_bytes,
        "total_bytes": total,
    }
    return Reason(ReasonCode.REPLICATING_DATA, detail)
