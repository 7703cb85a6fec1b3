"""Bringing data near hardware where no region has both (MAST 3.1, 4.3): which region, and starting the copy."""

from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid
from domain.spec import WorkloadSpec
from infra.db import events, outbox
from infra.db.models import Replica, Table, Workload

_NOT_ABOUT_DATA = frozenset({ReasonCode.NO_HARDWARE, ReasonCode.REGION_EXCLUDED, ReasonCode.REGION_UNREACHABLE})


def needs_data(spec: WorkloadSpec, answers: dict[str, Bid]) -> bool:
    """Whether no region that may run it has both its tables and the hardware types."""
    if not spec.tables:
        return False
    for bid in answers.values():
        codes = {r.code for r in bid.reasons}
        if not codes & (_NOT_ABOUT_DATA | {ReasonCode.DATA_NOT_HERE}):
            return False
    return True


def bring_data(
    session: Session, workload: Workload, spec: WorkloadSpec, regions: list[str], bid: Callable[[str], Bid]
) -> list[Reason]:
    """Starts copies of the missing tables to the region that could start the workload soonest, once.

    Soonest is the best plan by the order of criteria; where none could start now, the region that can place the most
    of it. `bid` answers for a region as if the data were there. The reasons say what is being copied.
    """
    copying = session.scalars(
        select(Replica)
        .where(Replica.data_table.in_(spec.tables), Replica.state == "copying")
        .order_by(Replica.data_table, Replica.region)
    ).all()
    for target in sorted({r.region for r in copying if r.requested_by == workload.id}):
        return [_progress(session, r) for r in copying if r.region == target]
    answers = [b for b in map(bid, regions) if not {r.code for r in b.reasons} & _NOT_ABOUT_DATA]
    if not answers:
        return []
    target = min(answers, key=_soonest).region
    out = []
    for table in sorted(spec.tables):
        row = session.get(Replica, (table, target))
        if row is not None and row.state == "ready":
            continue
        if row is None:
            source = _source(session, table)
            if source is None:
                out.append(Reason(ReasonCode.DATA_NOWHERE, {"table": table}))
                continue
            row = Replica(
                data_table=table, region=target, state="copying", source_region=source, requested_by=workload.id,
                done_bytes=0,
            )  # fmt: skip
            session.add(row)
            session.flush()
            outbox.replicate(session, table, source, target)
            events.record(
                session,
                "replica.copying",
                tenant=workload.tenant,
                workload=workload.id,
                region=target,
                detail={"table": table, "source": source},
            )
        out.append(_progress(session, row))
    return out


def _soonest(bid: Bid) -> tuple[object, ...]:
    if bid.plan is not None:
        return (0, bid.plan.key)
    short = [r for r in bid.reasons if r.code is ReasonCode.INSUFFICIENT_CAPACITY]
    lacking = sum(int(str(r.detail.get("tasks", 0))) - int(str(r.detail.get("placeable", 0))) for r in short)
    return (1, (lacking, bid.region))


def _source(session: Session, table: str) -> str | None:
    """The home region if its copy is complete, else the first region with a complete one."""
    home = session.get_one(Table, table).home_region
    ready = session.scalars(
        select(Replica.region).where(Replica.data_table == table, Replica.state == "ready").order_by(Replica.region)
    ).all()
    return home if home in ready else next(iter(ready), None)


def _progress(session: Session, replica: Replica) -> Reason:
    total = session.get_one(Table, replica.data_table).size_bytes
    detail = {
        "table": replica.data_table,
        "region": replica.region,
        "done_bytes": replica.done_bytes,
        "total_bytes": total,
    }
    return Reason(ReasonCode.REPLICATING_DATA, detail)
