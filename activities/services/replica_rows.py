"""Reads the replicas of a service: rows, workloads and machines become the facts of a decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from activities.services.replica_instances import pair_instances
from domain.capacity import CapacityKind
from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.reasons import ReasonCode
from domain.service import ReplicaPolicySpec
from infra.db.capacity import InstanceRow
from infra.db.models import Allocation, Machine, Workload
from infra.db.services import (
    REPORT_VALID_S,
    REQUESTS_LATE_S,
    REQUESTS_WINDOW_S,
    BalancerReport,
    ServiceReplica,
    ServiceRequests,
    ServiceRow,
)
from services.values import LossKind, ReplicaFacts, Stage

_REFUSED = {
    ReasonCode.CAPACITY_REFUSED, ReasonCode.PROVIDER_QUOTA, ReasonCode.LAUNCH_REQUEST_REFUSED, ReasonCode.NEVER_JOINED,
}  # fmt: skip
_PREEMPTED = {
    ReasonCode.MACHINE_LOST, ReasonCode.LAUNCH_TIMED_OUT, ReasonCode.PLATFORM_NOTICE, ReasonCode.MACHINE_DRAINED,
    ReasonCode.NOT_AT_PROVIDER, ReasonCode.AGENT_AWAY, ReasonCode.ENDED_BY_OPERATOR,
}  # fmt: skip
_EVICTED = {
    ReasonCode.EVICTED, ReasonCode.PREEMPTED_BY_OPERATOR, ReasonCode.CANCELLED_BY_USER,
}  # fmt: skip

_GPUS = Workload.spec["jobs"][0]["resources"]["gpus"].as_integer()
"""The number of GPUs of each machine of a replica."""


@dataclass(frozen=True)
class _Instance:
    id: str
    reason: Mapping[str, Any]
    """Why it is in its phase, or why it is to end."""
    leaves: bool
    """It is gone, lost or to end, or its platform reclaims it."""
    gone: bool
    granted: bool
    """The provider has launched it."""
    unused: bool
    """Its machine is cordoned, or has been ready for longer than a placement takes."""


@dataclass
class LiveReplica:
    """A replica that has not ended, according to its row, with its workload and its own machines."""

    row: ServiceReplica
    phase: Phase | None
    """The phase of its workload; None: the workload's row is deleted."""
    reason: Mapping[str, Any]
    """The reason of that phase."""
    noticed: bool
    """The platform reclaims a machine on which it runs."""
    instances: list[_Instance] = field(default_factory=list)
    ongoing: int | None = None
    """The number of its requests in progress; None: unknown."""
    gpus: tuple[str | None, int] | None = None
    """The type and the number of the GPUs of each of its machines; None: it is not placed."""

    @property
    def has_ended(self) -> bool:
        """Whether its workload has ended."""
        return self.phase is None or self.phase in TERMINAL_PHASES

    @property
    def cannot_start(self) -> bool:
        """Whether it waits for machines of its own of which at least one will not serve it.

        Machines that are ready are billed while the replica is not placed, for example because of an operator's hold or
        the quota.
        """
        return self.phase in QUEUED_PHASES and any(one.leaves or one.unused for one in self.instances)

    @property
    def live_instances(self) -> list[str]:
        """The ids of its own machines that are not gone."""
        return [one.id for one in self.instances if not one.gone]

    @property
    def loss(self) -> LossKind:
        """How it was lost, if it `has_ended` or `cannot_start`."""
        reasons = [self.reason] if self.has_ended else [one.reason for one in self.instances if one.leaves]
        codes = {reason.get("code") for reason in reasons}
        if codes & _REFUSED or not reasons:
            return LossKind.REFUSED
        if codes & _PREEMPTED or not self.has_ended:
            return LossKind.PREEMPTED
        if ReasonCode.STACK_STOPPED in codes:
            return LossKind.STOPPED
        if ReasonCode.LAUNCH_FAILED in codes:  # One for which the replica is to blame is `CANNOT_START`.
            return LossKind.NOT_STARTED
        return LossKind.EVICTED if codes & _EVICTED else LossKind.FAILED

    def limit_times(self, now_s: float) -> None:
        """Replaces times in the future with now. After the clock was set back, drains would otherwise wait for them."""
        now = datetime.fromtimestamp(now_s, UTC)
        for name in ("draining_at", "leaving_at", "ready_changed_at", "ejected_at"):
            at = getattr(self.row, name)
            if at is not None and at > now:
                setattr(self.row, name, now)

    def facts(self, now_s: float, policy: ReplicaPolicySpec) -> ReplicaFacts:
        """Returns the facts for a decision at `now_s`, in seconds since the epoch. `policy` has the requests by GPU."""
        row = self.row
        stage, since_s = self._stage(now_s)
        return ReplicaFacts(
            number=row.number,
            version=row.version,
            kind=CapacityKind(row.kind),
            zone=row.zone,
            stage=stage,
            since_s=since_s,
            was_ready=row.first_ready_at is not None,
            was_leaving=row.leaving_at is not None,
            is_base=row.is_base,
            replaces=row.replaces,
            is_queued=row.cluster is None and self.phase in QUEUED_PHASES,
            is_ejected=stage is Stage.UNREADY and row.ready,
            is_granted=all(one.granted for one in self.instances),
            load=row.load,
            ongoing=self.ongoing,
            requests_per_s=None if self.gpus is None else policy.qps_of(*self.gpus),
        )

    def _stage(self, now_s: float) -> tuple[Stage, float]:
        row = self.row
        if row.draining_at is not None:
            return Stage.DRAINING, row.draining_at.timestamp()
        leaves = self.noticed or self.phase is Phase.CHECKPOINTING or any(one.leaves for one in self.instances)
        if leaves or row.leaving_at is not None:
            return Stage.LEAVING, _epoch_s(row.leaving_at, now_s)
        if row.ready and self.phase is Phase.RUNNING and row.ejected_at is not None:
            return Stage.UNREADY, row.ejected_at.timestamp()
        if row.ready and self.phase is Phase.RUNNING:
            return Stage.READY, _epoch_s(row.ready_changed_at, now_s)
        if row.first_ready_at is not None:
            return Stage.UNREADY, _epoch_s(row.ready_changed_at, now_s)
        return Stage.STARTING, row.launched_at.timestamp()


def _epoch_s(at: datetime | None, otherwise_s: float) -> float:
    return otherwise_s if at is None else at.timestamp()


def held_zones(session: Session, service: str) -> set[str]:
    """Returns the names of the zones in which a service has replicas."""
    own = select(ServiceReplica.zone).where(ServiceReplica.service == service, ServiceReplica.ended_at.is_(None))
    return {zone for zone in session.scalars(own.distinct()) if zone is not None}


_BY_ZONE = text(
    "with own as (select number, workload from service_replica"
    " where service = :service and ended_at is null and number is distinct from :besides),"
    " at as (select o.number, i.region, i.zone from own as o"
    " join instance as i on i.workload = o.workload and i.gone_at is null"
    " union select o.number, m.region, coalesce(c.zone, '') from own as o"
    " join allocation as l on l.workload = o.workload and l.released_at is null join machine as m on m.id = l.machine"
    " join cluster as c on c.region = m.region and c.name = m.cluster)"
    " select region, zone, count(*) from at group by region, zone"
)


def replicas_by_zone(session: Session, service: str, besides: int | None) -> dict[tuple[str, str], int]:
    """Returns how many replicas of a service, without that with the number `besides`, each region and zone has.

    A replica counts from the request for its machines on.
    """
    rows = session.execute(_BY_ZONE, {"service": service, "besides": besides})
    return {(region, zone): many for region, zone, many in rows}


def read_replicas(session: Session, service: str, placement_s: float) -> list[LiveReplica]:
    """Returns the replicas of a service that have not ended, according to their rows, by number.

    Locks their rows, so that their readiness does not change before the end of the transaction. Instances are paired
    with replicas after the phases are read: a replica that is placed meanwhile counts as queued, with the instances on
    which it runs.

    Args:
        session: the session.
        service: the id of the service.
        placement_s: the longest time from a machine's being ready until its replica is placed, in seconds.
    """
    rows = session.execute(
        select(ServiceReplica, Workload.phase, Workload.reason)
        .outerjoin(Workload, Workload.id == ServiceReplica.workload)
        .where(ServiceReplica.service == service, ServiceReplica.ended_at.is_(None))
        .order_by(ServiceReplica.number)
        .with_for_update(of=ServiceReplica)
    ).all()
    pair_instances(session, service)
    workloads = [row.workload for row, _, _ in rows]
    held = session.execute(
        select(Allocation.workload, Machine.notice, Machine.gpu_type, _GPUS)
        .join(Machine, Machine.id == Allocation.machine)
        .join(Workload, Workload.id == Allocation.workload)
        .where(Allocation.workload.in_(workloads), Allocation.released_at.is_(None))
    ).all()
    noticed = {workload for workload, notice, _, _ in held if notice is not None}
    gpus = {workload: (gpu_type, number) for workload, _, gpu_type, number in held}
    found = {
        row.workload: LiveReplica(
            row, None if phase is None else Phase(phase), reason or {}, row.workload in noticed,
            gpus=gpus.get(row.workload),
        )
        for row, phase, reason in rows
    }  # fmt: skip
    _add_instances(session, found, placement_s)
    return list(found.values())


def _add_instances(session: Session, found: Mapping[str, LiveReplica], placement_s: float) -> None:
    late = InstanceRow.ready_at < func.now() - timedelta(seconds=placement_s)
    rows: Sequence[Any] = session.execute(
        select(InstanceRow, Machine.notice, func.coalesce(late, False) | Machine.cordon.is_not(None))
        .outerjoin(Machine, Machine.id == InstanceRow.machine)
        .where(InstanceRow.workload.in_(found))
        .order_by(InstanceRow.id)
    ).all()
    for row, notice, unused in rows:
        gone = row.gone_at is not None
        leaves = gone or row.ending is not None or row.lost_at is not None or notice is not None
        reason = row.ending or notice or row.reason or {}
        if row.workload is not None:
            found[row.workload].instances.append(
                _Instance(row.id, reason, leaves, gone, row.launched_at is not None, bool(unused))
            )


_SILENT_BALANCER_S = 600.0
"""A balancer that has been silent for longer no longer exists."""


def ejected_replicas(session: Session, service: str) -> dict[int, tuple[datetime, str]]:
    """Returns the replicas that balancers have ejected, each with the time and the reason.

    Each balancer judges by its own requests. So a replica counts as ejected only if all balancers that have it do so.
    """
    valid = BalancerReport.reported_at > func.now() - timedelta(seconds=REPORT_VALID_S)
    reports = session.execute(
        select(BalancerReport.reported_at, BalancerReport.replicas)
        .where(BalancerReport.service == service, valid)
        .order_by(BalancerReport.balancer)
    )
    said: dict[int, list[tuple[datetime, str] | None]] = {}
    for at, replicas in reports:
        for one in replicas:
            since = None if one["ejected_s"] is None else at - timedelta(seconds=one["ejected_s"])
            said.setdefault(one["replica"], []).append(None if since is None else (since, one["why"] or ""))
    found = {replica: [one for one in own if one is not None] for replica, own in said.items() if None not in own}
    return {replica: max(own) for replica, own in found.items()}


def take_ongoing(session: Session, service: str, live: Mapping[int, LiveReplica]) -> tuple[int, int]:
    """Returns the numbers of requests that wait for a first replica, and that are in progress, in all balancers.

    Sets `LiveReplica.ongoing`. Of a replica that drains or leaves it is known once all balancers have said since then
    that they send it no new requests, so that none is on its way. A balancer that was silent for a short time may send
    some.
    """
    recent = BalancerReport.reported_at > func.now() - timedelta(seconds=_SILENT_BALANCER_S)
    is_valid = BalancerReport.reported_at > func.now() - timedelta(seconds=REPORT_VALID_S)
    rows = session.execute(
        select(BalancerReport, is_valid).where(BalancerReport.service == service, recent)
    ).all()  # fmt: skip
    reports = [report for report, valid in rows if valid]
    said = [(report, {one["replica"]: one for one in report.replicas}) for report in reports]
    for number, replica in live.items():
        own = [(report, replicas.get(number)) for report, replicas in said]
        at = replica.row.draining_at or replica.row.leaving_at
        settled = at is None or all(
            report.reported_at > at and (one is None or one.get("drained", False)) for report, one in own
        )
        if own and settled and len(reports) == len(rows):
            replica.ongoing = sum(one["ongoing"] for _, one in own if one is not None)
    total = sum(one["ongoing"] for _, replicas in said for one in replicas.values())
    return sum(report.waiting for report in reports), total


def take_requests(session: Session, row: ServiceRow, silent_s: float, now_s: float) -> int | None:
    """Returns the number of requests since the decision before, of the last minute at most, and marks them as taken.

    Returns None if it is unknown: no balancer has reported for `silent_s` seconds, or the clock was set back. A
    balancer also reports seconds without requests, so its silence does not mean that there are none. `now_s` is the
    time of the database, in seconds since the epoch.
    """
    until = int(now_s) - REQUESTS_LATE_S
    before, row.counted_until = row.counted_until, until
    own = ServiceRequests.service == row.id
    newest = session.scalar(select(func.max(ServiceRequests.second)).where(own, ServiceRequests.second <= until))
    if newest is None or newest < until - silent_s or before > until:
        return None
    counted = select(func.coalesce(func.sum(ServiceRequests.requests), 0)).where(
        own, ServiceRequests.second > max(before, until - REQUESTS_WINDOW_S), ServiceRequests.second <= until
    )
    return int(session.scalar(counted) or 0)
