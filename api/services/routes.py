"""Endpoints that create, update, list, show and end services."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from sqlalchemy import select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Balancer, Caller, Submitter, Viewer
from api.bodies import JsonOnly, Name
from api.documents.installation_checks import check_receivers, check_service, fleet, notes_on_receivers
from api.documents.schema import SERVICE_DOCUMENT, SERVICE_EXAMPLE
from api.documents.service import read_service
from api.idempotency import IdempotencyKey
from api.masking import mask
from api.openapi import refusals
from api.paging import Cursor, Limit, NumberCursor, page
from api.people.secrets import secrets_key
from api.problems import HttpProblem, ProblemType, invalid, not_found, refuse_document
from api.routing import Router
from api.services.idempotent_versions import Asked, add_version, answer_again, once
from api.services.literal_secrets import name_literals, store_literals
from api.services.service_queries import (
    detail_fields,
    endpoint_list,
    find_service,
    replica_views,
    service_detail,
    service_views,
    spec_of,
)
from api.services.views import (
    CertificateView,
    EndpointList,
    ServiceChanged,
    ServiceDetail,
    ServicePage,
    ServiceReplicaPage,
)
from api.state import ApiState, StateOf
from api.views import write_audit
from api.workloads.submission import parse
from domain.ids import new_service_id
from domain.service import ServiceSpec, UpdateMode
from infra.db import events, outbox
from infra.db.services import ServiceReplica, ServiceRow
from infra.db.tenants import Secret
from infra.keys import decrypt_secret

router = Router(prefix="/v1/services", tags=["services"])
_DOCUMENT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media: {"schema": {"$ref": "#/components/schemas/ServiceDocument"}, "example": SERVICE_EXAMPLE}
            for media in ("application/yaml", "application/json")
        },
    }
}
SCHEMAS = {"ServiceDocument": SERVICE_DOCUMENT}
"""OpenAPI components that the operations in this module refer to."""
_NameQuery = Annotated[Name | None, Query(description="Name of the service if the document has none")]


@router.post(
    "", status_code=201, response_model=ServiceChanged, summary="Create a service", openapi_extra=_DOCUMENT_BODY,
    responses=refusals(409),
)  # fmt: skip
async def create_service(
    request: Request, state: StateOf, caller: Submitter, name: _NameQuery = None, key: IdempotencyKey = None
) -> Any:
    """Creates a service from a document and launches its replicas. An error response lists all errors."""
    asked = Asked.of(key, await request.body(), "create", name)
    return await state.documents.run(caller, asked.body, partial(_create, state, caller, request, asked, name))


def _create(state: ApiState, caller: Caller, request: Request, asked: Asked, name: str | None) -> ServiceChanged:
    value = parse(request, asked.body)

    def make(session: Session) -> ServiceChanged:
        admitted = _admit(session, state, caller, value, name)
        spec = admitted.spec
        made = session.scalar(
            insert(ServiceRow)
            .values(id=new_service_id(), tenant=spec.tenant, name=spec.name, created_by=caller.id)
            .on_conflict_do_nothing()
            .returning(ServiceRow.id)
        )
        if made is not None:
            return _changed(session, state, caller, session.get_one(ServiceRow, made), admitted, asked, "created")
        # The insert waited for a concurrent request, which may have used the same key.
        answered = answer_again(session, state.queue, caller, asked)
        if answered is None:
            raise HttpProblem(
                ProblemType.CONFLICT,
                f"service {spec.name} of tenant {spec.tenant} exists; update it, or end it and wait until it has ended",
            )
        return answered

    return once(state, caller, asked, make)


@router.put(
    "/{id}", response_model=ServiceChanged, summary="Update a service", openapi_extra=_DOCUMENT_BODY,
    responses=refusals(404, 409),
)  # fmt: skip
async def update_service(
    id: str,
    request: Request,
    state: StateOf,
    caller: Submitter,
    mode: Annotated[UpdateMode, Query(description="How replicas of older versions are replaced")] = UpdateMode.ROLLING,
    key: IdempotencyKey = None,
) -> Any:
    """Replaces the document of a service; `id` is its id or name. Replicas of the older version are replaced.

    The document must have the service's name and tenant, or none.
    """
    asked = Asked.of(key, await request.body(), "update", id, mode.value)
    return await state.documents.run(caller, asked.body, partial(_update, state, caller, request, asked, id, mode))


def _update(
    state: ApiState, caller: Caller, request: Request, asked: Asked, ref: str, mode: UpdateMode
) -> ServiceChanged:
    value = parse(request, asked.body)

    def make(session: Session) -> ServiceChanged:
        row = find_service(session, caller, ref, lock=True)
        if row.stopping_at is not None:
            raise HttpProblem(ProblemType.CONFLICT, f"service {row.name} is ending or has ended")
        admitted = _admit(session, state, caller, value, row.name, row.tenant)
        spec = admitted.spec
        for what, given, own in (("name", spec.name, row.name), ("tenant", spec.tenant, row.tenant)):
            if given != own:
                raise HttpProblem(
                    ProblemType.CONFLICT, f"{what}: {given}: must be {own}; the {what} of a service cannot be changed"
                )
        if spec.canary is not None and mode is UpdateMode.BLUE_GREEN:
            raise invalid("mode", "blue_green: must be rolling if the document has service.update.canary")
        row.version, row.mode, row.notes = row.version + 1, mode.value, []
        return _changed(session, state, caller, row, admitted, asked, "updated")

    return once(state, caller, asked, make)


@dataclass(frozen=True)
class _Admitted:
    """A valid document."""

    spec: ServiceSpec
    notes: list[str]
    literals: dict[str, str]
    """Secrets whose values are in the document, by the names under which they are stored."""


def _admit(
    session: Session, state: ApiState, caller: Caller, value: Any, name: str | None, tenant: str | None = None
) -> _Admitted:
    draft = read_service(value, caller.tenant or tenant, name)
    check_service(session, draft, caller.tenant, fleet(session))
    check_receivers(draft, state.settings.notify)
    if draft.problems:
        raise refuse_document(draft.problems)
    literals = name_literals(session, state, draft)
    spec = draft.spec()
    return _Admitted(spec, draft.notes + notes_on_receivers(spec.notify, state.settings.notify), literals)


def _changed(
    session: Session, state: ApiState, caller: Caller, row: ServiceRow, admitted: _Admitted, asked: Asked, what: str
) -> ServiceChanged:
    store_literals(session, state, caller, row, admitted.literals)
    add_version(session, caller, row, admitted.spec, asked)
    detail = {"service": row.id, "name": row.name, "version": row.version}
    events.record(session, f"service.{what}", tenant=row.tenant, detail={**detail, "by": caller.id})
    write_audit(session, caller, f"service.{what}", row.id, tenant=row.tenant, name=row.name, version=row.version)
    outbox.service(session, row.id)
    fields = detail_fields(session, state.queue, row)
    return mask(session, caller, ServiceChanged(**fields, document_notes=admitted.notes))


@router.get("", summary="List services")
def list_services(
    state: StateOf,
    caller: Viewer,
    tenant: Annotated[Name | None, Query(description="Only services of this tenant")] = None,
    ended: Annotated[bool, Query(description="Include services that have ended")] = False,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> ServicePage:
    """Lists the services that the caller may see, sorted by tenant and name."""
    order = (ServiceRow.tenant, ServiceRow.name, ServiceRow.id)
    wanted = select(ServiceRow).order_by(*order).limit(limit + 1)
    for name in (tenant, caller.tenant):
        if name is not None:
            wanted = wanted.where(ServiceRow.tenant == name)
    if not ended:
        wanted = wanted.where(ServiceRow.ended_at.is_(None))
    if cursor is not None:
        after_tenant, _slash, after = cursor.partition("/")
        after_name, _slash, after_id = after.partition("/")
        wanted = wanted.where(tuple_(*order) > tuple_(after_tenant, after_name, after_id))
    with state.transaction() as session:
        rows, following = page(session.scalars(wanted).all(), limit, lambda row: f"{row.tenant}/{row.name}/{row.id}")
        return ServicePage(items=service_views(session, rows), next_cursor=following)


@router.get("/{id}", summary="Show a service", responses=refusals(404, 409))
def show_service(id: str, state: StateOf, caller: Viewer) -> ServiceDetail:
    """Returns a service with its replicas; `id` is its id, or the name of a live service."""
    with state.transaction() as session:
        return mask(session, caller, service_detail(session, state.queue, find_service(session, caller, id)))


@router.get("/{id}/replicas", summary="List a service's replicas", responses=refusals(404, 409))
def list_replicas(
    id: str, state: StateOf, caller: Viewer, limit: Limit = 100, cursor: NumberCursor = None
) -> ServiceReplicaPage:
    """Lists all replicas of a service, newest first. Replicas that have ended are included."""
    with state.transaction() as session:
        row = find_service(session, caller, id)
        own = select(ServiceReplica).where(ServiceReplica.service == row.id)
        if cursor is not None:
            own = own.where(ServiceReplica.number < int(cursor))
        found = session.scalars(own.order_by(ServiceReplica.number.desc()).limit(limit + 1)).all()
        rows, following = page(found, limit, lambda one: str(one.number))
        return mask(
            session, caller, ServiceReplicaPage(items=replica_views(session, state.queue, rows), next_cursor=following)
        )


@router.get("/{id}/endpoints", summary="List a service's endpoints", responses=refusals(404, 409))
def list_endpoints(id: str, state: StateOf, caller: Balancer) -> EndpointList:
    """Returns the replicas that serve, for a balancer. The event `service.endpoints` says that they changed."""
    with state.transaction() as session:
        return endpoint_list(session, find_service(session, caller, id))


@router.get("/{id}/certificate", summary="Show a service's certificate and its key", responses=refusals(404, 409))
def show_certificate(id: str, state: StateOf, caller: Balancer) -> CertificateView:
    """Returns the certificate with its private key, for the key of a balancer or an operator only."""
    caller.require_balancer()
    with state.transaction() as session:
        row = find_service(session, caller, id)
        name = spec_of(session, row).certificate
        secret = None if name is None else session.get(Secret, (row.tenant, name))
        if secret is None:
            raise not_found("certificate of service", row.name)
        write_audit(session, caller, "service.certificate", row.id, tenant=row.tenant, name=row.name)
        return CertificateView(name=secret.name, pem=decrypt_secret(secrets_key(session, state), secret.box))


@router.delete("/{id}", status_code=202, summary="End a service", dependencies=[JsonOnly], responses=refusals(404, 409))
def end_service(id: str, state: StateOf, caller: Submitter) -> ServiceDetail:
    """Ends a service with all its replicas and their machines. Ending it again changes nothing."""
    with state.transaction() as session:
        row = find_service(session, caller, id, lock=True)
        if row.stopping_at is None:
            row.stopping_at = datetime.now(UTC)
            detail = {"service": row.id, "name": row.name, "by": caller.id}
            events.record(session, "service.ending", tenant=row.tenant, detail=detail)
            write_audit(session, caller, "service.end", row.id, tenant=row.tenant, name=row.name)
            outbox.service(session, row.id)
        return mask(session, caller, service_detail(session, state.queue, row))
