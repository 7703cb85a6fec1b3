"""Reads services and their replicas from the database, and builds the API's views."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Caller
from api.problems import HttpProblem, ProblemType, not_found
from api.services.views import (
    CanaryView,
    EndpointList,
    EndpointView,
    NoteView,
    RequestsView,
    ServiceDetail,
    ServiceReplicaView,
    ServiceView,
)
from api.views import ReasonView, notification_views, reason_view
from api.workloads.reasons import why_all
from domain.phases import QUEUED_PHASES, Phase
from domain.service import ServiceSpec, UpdateMode
from infra.db import published_queue
from infra.db.capacity import InstanceRow
from infra.db.endpoints import DRAINING, READY, Endpoint, read_endpoints, read_endpoints_of
from infra.db.models import Workload
from infra.db.services import (
    REQUESTS_LATE_S,
    REQUESTS_WINDOW_S,
    ServiceReplica,
    ServiceRequests,
    ServiceRow,
    ServiceVersion,
)
from services.account import Account
from services.canary import CANARY_FAILED, CANARY_RUNS, CANARY_WAITS, LEAST_ANSWERS
from services.values import REPLICA_EJECTED, LossKind

_PREFIX = "sv-"
_ENDING_S = 3
"""The recorded end of a machine may be in the past, by the duration of a transaction. So the cost of a running machine
is therefore counted up to this long ago. Otherwise the cost could fall, which Prometheus takes for a counter reset."""
_NOTES = {
    "on_demand_refused": "a provider refused to launch an on-demand machine; it is tried again",
    "replicas_fail": "replicas failed; further ones are launched after a pause",
    "installation_stopped": "the installation was stopped; replicas are launched again after a pause",
    "update_given_up": "the update was abandoned: its replicas failed or found no machines; the older version serves",
    "no_machine_fits": "a replica was not launched, because the version accepts no machine that is offered there",
    "offers_unknown": "replicas wait until the providers have answered which machines they offer",
    "no_other_zone": "a replica was not launched, because its document requires another zone for each replica",
    "machine_limit": "the services of the tenant have as many machines as the setting services.tenant_machines allows",
    CANARY_RUNS: "the newest version is a canary: it gets a share of the requests, and is judged by its answers",
    CANARY_WAITS: f"the canary has fewer than {LEAST_ANSWERS} answers; the update continues once they have judged it",
    CANARY_FAILED: "the canary failed, so the update was abandoned; the older version serves",
    REPLICA_EJECTED: "requests to a replica fail or hang although its probe succeeds, so balancers send it none",
    "no_spot_zones": "no provider offers spot machines that the service may use",
}
"""Sentences for the notes of decisions (`services.values.ServiceDecision.notes`)."""


def find_service(session: Session, caller: Caller, ref: str, *, lock: bool = False) -> ServiceRow:
    """Returns a service by its id, or a live service by its name.

    Raises:
        Problem: 404 if there is none that the caller may see; 409 if services of several tenants have the name.
    """
    wanted = select(ServiceRow)
    if ref.startswith(_PREFIX) and session.get(ServiceRow, ref) is not None:
        wanted = wanted.where(ServiceRow.id == ref)
    else:
        wanted = wanted.where(ServiceRow.name == ref, ServiceRow.ended_at.is_(None))
        if caller.tenant is not None:
            wanted = wanted.where(ServiceRow.tenant == caller.tenant)
    rows = session.scalars(wanted.with_for_update() if lock else wanted).all()
    seen = [row for row in rows if caller.sees(row.tenant)]
    if not seen:
        ended = _newest_ended(session, caller, ref)
        if ended is not None:
            raise HttpProblem(
                ProblemType.NOT_FOUND, f"there is no service {ref!r}; the last one has ended, its id is {ended}"
            )
        raise not_found("service", ref, is_hidden=bool(rows))
    if len(seen) > 1:
        found = ", ".join(sorted(f"{row.id} of {row.tenant}" for row in seen))
        raise HttpProblem(ProblemType.CONFLICT, f"several services are named {ref}: {found}; use an id")
    return seen[0]


def _newest_ended(session: Session, caller: Caller, name: str) -> str | None:
    """Returns the id of the service with this name that the caller may see and that ended last."""
    wanted = select(ServiceRow.id).where(ServiceRow.name == name, ServiceRow.ended_at.is_not(None))
    if caller.tenant is not None:
        wanted = wanted.where(ServiceRow.tenant == caller.tenant)
    return session.scalar(wanted.order_by(ServiceRow.ended_at.desc()).limit(1))


def spec_of(session: Session, row: ServiceRow) -> ServiceSpec:
    """Returns the newest version's specification."""
    return ServiceSpec.model_validate(session.get_one(ServiceVersion, (row.id, row.version)).spec)


def service_views(session: Session, rows: Sequence[ServiceRow]) -> list[ServiceView]:
    """Returns the views of services, in the same order. The number of queries does not depend on their number."""
    return [ServiceView(**fields) for fields in _fields(session, rows)]


def service_detail(session: Session, queue: published_queue.Newest, row: ServiceRow) -> ServiceDetail:
    """Returns a service with its replicas and its specification."""
    return ServiceDetail(**detail_fields(session, queue, row))


def detail_fields(session: Session, queue: published_queue.Newest, row: ServiceRow) -> dict[str, Any]:
    """Returns the fields of `ServiceDetail`."""
    spec = spec_of(session, row)
    own = select(ServiceReplica).where(ServiceReplica.service == row.id, ServiceReplica.ended_at.is_(None))
    [fields] = _fields(session, [row])
    return {
        **fields,
        "policy": (row.state or {}).get("placer", spec.policy.placer or "on-demand"),
        "update_mode": UpdateMode(row.mode),
        "zones": [offer["zone"]["name"] for offer in row.zones],
        "replicas": replica_views(session, queue, session.scalars(own.order_by(ServiceReplica.number)).all()),
        "spec": spec.model_dump(mode="json"),
        "notes": _notes_with_failure(session, row),
        "notifications": notification_views(session, row.id) if row.ended_at is not None else [],
    }


def _fields(session: Session, rows: Sequence[ServiceRow]) -> list[dict[str, Any]]:
    ids = [row.id for row in rows]
    endpoints = read_endpoints_of(session, ids)
    replicas = _replica_counts(session, ids)
    usd = _usd(session, ids)
    requests = _requests(session, ids)
    return [
        _fields_of(row, endpoints[row.id], replicas.get(row.id, (0, 0)), usd.get(row.id, 0.0), requests.get(row.id))
        for row in rows
    ]


def _fields_of(
    row: ServiceRow,
    endpoints: Iterable[Endpoint],
    replicas: tuple[int, int],
    usd: float,
    requests: RequestsView | None,
) -> dict[str, Any]:
    ready = [one for one in endpoints if one.state == READY and not one.ejected]
    stored = (row.state or {}).get("account")
    account = None if stored is None else Account(**stored)
    live, preemptions = replicas
    return {
        "id": row.id,
        "tenant": row.tenant,
        "name": row.name,
        "version": row.version,
        "state": _state(row, len(ready)),
        "target": row.target,
        "ready": _counted(f"{one.kind} {one.region}/{one.zone or 'shared'}" for one in ready),
        "live": live,
        "versions": _counted(str(one.version) for one in ready),
        "availability": None if account is None else account.availability,
        "usd": usd,
        "usd_on_demand": None if account is None else account.on_demand_usd,
        "preemptions": preemptions,
        "requests": requests,
        "notes": [NoteView(code=code, sentence=_NOTES.get(code, code)) for code in row.notes],
        "created_at": row.created_at,
        "stopping_at": row.stopping_at,
        "ended_at": row.ended_at,
    }


def _state(row: ServiceRow, ready: int) -> str:
    if row.ended_at is not None:
        return "ended"
    if row.stopping_at is not None:
        return "stopping"
    if row.state is not None and not ready and not row.target:
        return "scaled_to_zero"
    if row.state is not None and ready >= row.target:
        return "ready"
    return "degraded" if ready else "starting"


def _counted(names: Iterable[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for name in sorted(names):
        out[name] = out.get(name, 0) + 1
    return out


def _replica_counts(session: Session, services: Collection[str]) -> dict[str, tuple[int, int]]:
    """Returns for each service the number of replicas that have not ended, and of those that were preempted."""
    counts = select(
        ServiceReplica.service,
        func.count().filter(ServiceReplica.ended_at.is_(None)),
        func.count().filter(ServiceReplica.cause == LossKind.PREEMPTED.value),
    )
    own = counts.where(ServiceReplica.service.in_(services)).group_by(ServiceReplica.service)
    return {service: (live, preemptions) for service, live, preemptions in session.execute(own)}


def _usd(session: Session, services: Collection[str]) -> dict[str, float]:
    """Returns the cost of each service's own machines, from each launch to its end or to now."""
    until = func.coalesce(InstanceRow.gone_at, func.now() - timedelta(seconds=_ENDING_S))
    ran_s = func.greatest(0.0, func.extract("epoch", until - InstanceRow.started_at))
    own = select(InstanceRow.pool, func.sum(InstanceRow.usd_per_h * ran_s / 3600.0)).where(
        InstanceRow.pool.in_(services), InstanceRow.workload.is_not(None), InstanceRow.started_at.is_not(None)
    )
    return {service: float(usd) for service, usd in session.execute(own.group_by(InstanceRow.pool))}


def weighted(value: Any) -> Any:
    """Returns the SQL mean of a value of `ServiceRequests`, weighted by the requests of each second that has one."""
    counted = ServiceRequests.requests
    return func.sum(counted * value) / func.nullif(func.sum(counted).filter(value.is_not(None)), 0)


def _requests(session: Session, services: Collection[str]) -> dict[str, RequestsView]:
    now = func.extract("epoch", func.now())
    rows: Sequence[Any] = session.execute(
        select(
            ServiceRequests.service,
            func.sum(ServiceRequests.requests),
            func.sum(ServiceRequests.failed),
            func.sum(ServiceRequests.cut),
            weighted(ServiceRequests.p50_s),
            weighted(ServiceRequests.p99_s),
        )
        .where(
            ServiceRequests.service.in_(services),
            ServiceRequests.second > now - (REQUESTS_WINDOW_S + REQUESTS_LATE_S),
            ServiceRequests.second <= now - REQUESTS_LATE_S,
        )
        .group_by(ServiceRequests.service)
    ).all()
    return {
        service: RequestsView(
            per_s=float(requests) / REQUESTS_WINDOW_S,
            failed=int(failed),
            cut=int(cut),
            p50_s=_float(p50_s),
            p99_s=_float(p99_s),
        )
        for service, requests, failed, cut, p50_s, p99_s in rows
    }


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


# ------------------------------------------------------------------------------------------------------------ replicas


def replica_views(
    session: Session, queue: published_queue.Newest, rows: Sequence[ServiceReplica]
) -> list[ServiceReplicaView]:
    """Returns the views of replicas, in the same order. A waiting replica has the reason that `mizzen why` shows."""
    wanted = select(Workload).where(Workload.id.in_([row.workload for row in rows]))
    workloads = {one.id: one for one in session.scalars(wanted)}
    own = select(InstanceRow.workload, InstanceRow.region, InstanceRow.zone).where(InstanceRow.workload.in_(workloads))
    zones = {workload: f"{region}/{zone}" for workload, region, zone in session.execute(own)}
    endpoints = read_endpoints_of(session, {row.service for row in rows})
    states = {(service, one.replica): one.state for service, found in endpoints.items() for one in found}
    waiting = [one for one in workloads.values() if Phase(one.phase) in QUEUED_PHASES]
    whys = {id_: why.first for id_, why in why_all(session, queue, waiting).items()}
    return [
        _replica_view(row, workloads.get(row.workload), states, zones.get(row.workload), whys.get(row.workload))
        for row in rows
    ]


def _replica_view(
    row: ServiceReplica,
    workload: Workload | None,
    states: Mapping[tuple[str, int], str],
    zone: str | None,
    why: ReasonView | None,
) -> ServiceReplicaView:
    return ServiceReplicaView.from_row(
        row,
        stage=_stage(row, workload, states.get((row.service, row.number))),
        zone=row.zone or zone,
        ready_at=row.first_ready_at,
        probe_error=None if row.ready else row.probe_error,
        ejected=row.ejected_why,
        phase=None if workload is None else workload.phase,
        reason=why or (None if workload is None else reason_view(workload.reason)),
    )


def _stage(row: ServiceReplica, workload: Workload | None, listed: str | None) -> Any:
    if row.ended_at is not None:
        return "ended"
    if row.ending_at is not None:
        return "ending"
    if row.draining_at is not None:
        return "draining"
    if row.leaving_at is not None or listed == DRAINING:
        return "leaving"
    if row.ready and workload is not None and workload.phase == Phase.RUNNING:
        return "ready" if row.ejected_at is None else "unready"
    return "starting" if row.first_ready_at is None else "unready"


def endpoint_list(session: Session, row: ServiceRow) -> EndpointList:
    """Returns the endpoints of a service for its balancers."""
    spec = spec_of(session, row)
    endpoints = read_endpoints(session, row.id)
    canary = spec.canary if any(one.is_canary for one in endpoints) else None
    return EndpointList(
        service=row.id,
        name=row.name,
        version=row.version,
        policy=spec.balancing,
        sticky_header=None if spec.sticky is None else spec.sticky.header,
        sticky_prefix_bytes=None if spec.sticky is None else spec.sticky.prefix_bytes,
        resume=spec.resume,
        retry_non_idempotent=spec.retry_non_idempotent,
        request_timeout_s=spec.request_timeout_s,
        first_byte_s=spec.first_byte_s,
        max_queue=spec.max_queue,
        hold_s=spec.hold_s,
        drain_s=spec.serving.drain_s,
        probe_path=spec.serving.probe.path,
        probe_is_get=spec.serving.probe.body is None,
        certificate=spec.certificate,
        canary=None if canary is None else CanaryView(version=row.version, share=canary.share, slow_s=canary.p90_s),
        endpoints=[EndpointView(**vars(one)) for one in endpoints],
    )


# --------------------------------------------------------------------------------------------------------------- notes


def _notes_with_failure(session: Session, row: ServiceRow) -> list[NoteView]:
    """Returns the notes of a service. Notes about failed or ejected replicas also name them and the reason."""
    return [
        NoteView(code=code, sentence="; ".join((_NOTES.get(code, code), *_failure(session, row, code))))
        for code in row.notes
    ]


def _failure(session: Session, row: ServiceRow, note: str) -> list[str]:
    """Returns why the newest failed replica failed, if the note is about failures and the reason is stored."""
    failed = (
        select(ServiceReplica.number, Workload.reason)
        .join(Workload, Workload.id == ServiceReplica.workload)
        .where(ServiceReplica.service == row.id, ServiceReplica.cause == LossKind.FAILED.value)
        .order_by(ServiceReplica.number.desc())
        .limit(1)
    )
    if note == "update_given_up":
        failed = failed.where(ServiceReplica.version == row.version)
    elif note == CANARY_FAILED:
        return [row.state["canary"]["why"]] if row.state is not None else []
    elif note == REPLICA_EJECTED:
        return _ejected(session, row)
    elif note != "replicas_fail":
        return []
    found = [(number, reason_view(body)) for number, body in session.execute(failed)]
    return [f"replica {number}: {reason.sentence}" for number, reason in found if reason is not None]


def _ejected(session: Session, row: ServiceRow) -> list[str]:
    """Returns the reason for each replica that balancers eject."""
    own = select(ServiceReplica.number, ServiceReplica.ejected_why).where(
        ServiceReplica.service == row.id, ServiceReplica.ended_at.is_(None), ServiceReplica.ejected_at.is_not(None)
    )
    return [f"replica {number}: {why}" for number, why in session.execute(own.order_by(ServiceReplica.number))]
