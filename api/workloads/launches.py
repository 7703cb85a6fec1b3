"""Says which machines are being launched for waiting workloads, and which pools cannot launch any."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.orm import Session

from api.views import ReasonView, reason_view
from domain.lifecycle.instances import InstancePhase
from domain.reasons import Reason, ReasonCode
from domain.shortage import short_regions
from infra.db.capacity import InstanceRow, PoolRow

_COMING = [phase.value for phase in (InstancePhase.REQUESTED, InstancePhase.LAUNCHING, InstancePhase.JOINING)]


def machines_on_their_way(session: Session, workloads: Sequence[str]) -> dict[str, list[ReasonView]]:
    """Returns, by workload, the machines that are being launched for it: type, zone and seconds until expected."""
    if not workloads:
        return {}
    found = session.execute(
        select(
            InstanceRow.wanted_by,
            InstanceRow.machine_type,
            InstanceRow.zone,
            InstanceRow.expected_at,
            InstanceRow.reason,
        )
        .where(
            InstanceRow.wanted_by.has_any(array(workloads)),
            InstanceRow.phase.in_(_COMING),
            InstanceRow.gone_at.is_(None),
        )
        .order_by(InstanceRow.id)
    ).all()
    asked = set(workloads)
    rows = [
        (workload, machine_type, zone, at, reason)
        for wanted_by, machine_type, zone, at, reason in found
        for workload in wanted_by
        if workload in asked
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    expected: dict[tuple[str, str, str], float] = {}
    words: dict[tuple[str, str, str], str] = {}
    now = datetime.now(UTC)
    for workload, machine_type, zone, at, reason in rows:
        key = workload, machine_type, zone
        counts[key] += 1
        if reason is not None and reason["code"] == ReasonCode.PENDING_AT_PROVIDER:
            words[key] = reason["detail"]["words"]
        expected[key] = max(expected.get(key, 0.0), 0.0 if at is None else (at - now).total_seconds())
    out: dict[str, list[ReasonView]] = {}
    for key, machines in counts.items():
        workload, machine_type, zone = key
        detail = {
            "machines": machines, "machine_type": machine_type, "zone": zone, "expected_s": round(expected[key]),
        }  # fmt: skip
        if key in words:
            detail["words"] = words[key]
        view = ReasonView(**Reason(ReasonCode.WAITING_FOR_CAPACITY, detail).to_json())
        out.setdefault(workload, []).append(view)
    return out


def pools_that_cannot_grow(
    session: Session, waiting: Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]]
) -> dict[str, list[ReasonView]]:
    """Returns, by workload, why growing pools of regions that lack only machines for it launch none.

    Args:
        session: a transaction of the API.
        waiting: tenant and reasons (`Waiting.reasons`) of each queued workload, by id.
    """
    regions = {id_: found for id_, (_, reasons) in waiting.items() if (found := short_regions(reasons))}
    if not regions:
        return {}
    pools = session.execute(
        select(PoolRow.region, PoolRow.tenants, PoolRow.reason)
        .where(PoolRow.region.in_(frozenset().union(*regions.values())))
        .where(PoolRow.max_size.is_not(None), PoolRow.reason.is_not(None))
        .order_by(PoolRow.region, PoolRow.name)
    ).all()
    out: dict[str, list[ReasonView]] = {}
    for id_, lacking in regions.items():
        for region, tenants, reason in pools:
            if region in lacking and (not tenants or waiting[id_][0] in tenants):
                view = reason_view(reason)
                out.setdefault(id_, []).extend([view] if view is not None else [])
    return out
