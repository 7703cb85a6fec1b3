"""Finds the machines that are being launched for waiting workloads."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import array
from sqlalchemy.orm import Session

from api.views import ReasonView
from domain.lifecycle.instances import InstancePhase
from domain.reasons import Reason, ReasonCode
from infra.db.capacity import InstanceRow

_COMING = [phase.value for phase in (InstancePhase.REQUESTED, InstancePhase.LAUNCHING, InstancePhase.JOINING)]


def machines_on_their_way(session: Session, workloads: Sequence[str]) -> dict[str, list[ReasonView]]:
    """Returns, by workload, the machines that are being launched for it: type, zone and seconds until expected."""
    if not workloads:
        return {}
    found = session.execute(
        select(InstanceRow.wanted_by, InstanceRow.machine_type, InstanceRow.zone, InstanceRow.expected_at)
        .where(
            InstanceRow.wanted_by.has_any(array(workloads)),
            InstanceRow.phase.in_(_COMING),
            InstanceRow.gone_at.is_(None),
        )
        .order_by(InstanceRow.id)
    ).all()
    asked = set(workloads)
    rows = [
        (workload, machine_type, zone, at)
        for wanted_by, machine_type, zone, at in found
        for workload in wanted_by
        if workload in asked
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    expected: dict[tuple[str, str, str], float] = {}
    now = datetime.now(UTC)
    for workload, machine_type, zone, at in rows:
        key = workload, machine_type, zone
        counts[key] += 1
        expected[key] = max(expected.get(key, 0.0), 0.0 if at is None else (at - now).total_seconds())
    out: dict[str, list[ReasonView]] = {}
    for key, machines in counts.items():
        workload, machine_type, zone = key
        detail = {
            "machines": machines, "machine_type": machine_type, "zone": zone, "expected_s": round(expected[key]),
        }  # fmt: skip
        view = ReasonView(**Reason(ReasonCode.WAITING_FOR_CAPACITY, detail).to_json())
        out.setdefault(workload, []).append(view)
    return out
