"""The endpoints of a service: the replicas to which its balancers send requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.phases import PLACED_PHASES, Phase
from domain.service import UpdateMode
from infra.db.models import Allocation, Cluster, Machine, Workload
from infra.db.services import ServiceReplica, ServiceRow

READY, DRAINING = "ready", "draining"


@dataclass(frozen=True)
class Endpoint:
    """A replica that serves requests."""

    replica: int
    """The replica's number."""
    version: int
    address: str
    port: int
    region: str
    zone: str | None
    """The platform's name of the zone of its machine."""
    gpu_type: str | None
    kind: str
    """`spot` or `on_demand`."""
    state: str
    """`ready`; or `draining`: requests in progress continue, and it gets no new ones."""
    ejected: bool = False
    """Whether balancers send it no requests, or few, because its answers fail."""
    is_canary: bool = False
    """Whether it is a canary, which gets only a share of the requests until its version is judged."""


def read_endpoints(session: Session, service: str) -> list[Endpoint]:
    """Returns the endpoints of a service, by the replica's number.

    During an update, the successor of a replica is not an endpoint before its predecessor drains. The replicas of a
    canary become endpoints together, beside their predecessors. In a blue-green update, no replica of the newest
    version is an endpoint while one of an older version is ready.
    """
    return read_endpoints_of(session, [service])[service]


def read_endpoints_of(session: Session, services: Collection[str]) -> dict[str, list[Endpoint]]:
    """Returns the result of `read_endpoints` for each of the services, with one query."""
    rows: Sequence[Any] = session.execute(
        select(
            ServiceReplica, Workload.phase, Machine.region, Cluster.zone, Machine.gpu_type, Machine.notice,
            ServiceRow.version, ServiceRow.mode, ServiceRow.state["canary"],
        )
        .join(ServiceRow, ServiceRow.id == ServiceReplica.service)
        .join(Workload, Workload.id == ServiceReplica.workload)
        .join(Allocation, (Allocation.workload == Workload.id) & (Allocation.attempt == Workload.attempt))
        .join(Machine, Machine.id == Allocation.machine)
        .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
        .where(
            ServiceReplica.service.in_(services),
            ServiceReplica.ended_at.is_(None),
            ServiceReplica.address.is_not(None),
            Workload.phase.in_(sorted(PLACED_PHASES)),
        )
        .order_by(ServiceReplica.number, Allocation.machine)
        # A replica that the session has read before may have got its address since then.
        .execution_options(populate_existing=True)
    ).all()  # fmt: skip
    by_service: dict[str, list[Any]] = {service: [] for service in services}
    for row in rows:
        by_service[row[0].service].append(row)
    return {service: _endpoints(own) for service, own in by_service.items()}


def _endpoints(rows: Sequence[Any]) -> list[Endpoint]:
    serving = {row.number for row, phase, *_ in rows if _serves(row, phase)}
    older = any(_serves(row, phase) and row.ready and row.version < version for row, phase, *_, version, _, _ in rows)
    found: dict[int, Endpoint] = {}
    for row, phase, region, zone, gpu_type, notice, version, mode, canary in rows:
        assert row.address is not None and row.port is not None
        drains = not _serves(row, phase) or notice is not None
        is_hidden = older and mode == UpdateMode.BLUE_GREEN and row.version == version
        is_on_trial = canary is not None and canary["version"] == row.version == version and canary["verdict"] is None
        has_begun = canary is not None and canary["version"] == row.version and canary["since_s"] is not None
        is_early = is_hidden or (not has_begun and (is_on_trial or row.replaces in serving))
        if row.first_ready_at is None or (not drains and (is_early or not row.ready)):
            continue
        state = DRAINING if drains or (row.number in found and found[row.number].state == DRAINING) else READY
        found[row.number] = Endpoint(
            row.number, row.version, row.address, row.port, region, zone, gpu_type, row.kind, state,
            row.ejected_at is not None, is_on_trial,
        )  # fmt: skip
    return list(found.values())


def _serves(row: ServiceReplica, phase: str) -> bool:
    return phase == Phase.RUNNING and row.draining_at is None and row.leaving_at is None and row.ending_at is None
