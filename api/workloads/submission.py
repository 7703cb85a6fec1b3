"""Submission: creates a workload, its event, audit entry and outbox message from a document, in one transaction."""

import hashlib

from fastapi import Request
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Caller
from api.documents.feasibility import never
from api.documents.installation_checks import check, check_keep, check_receivers, fleet, notes_on_receivers
from api.documents.syntax import Malformed, Value, load_json, load_yaml
from api.documents.workload import read_workload
from api.idempotency import mismatch
from api.masking import mask
from api.problems import FieldError, HttpProblem, ProblemType, refuse_document
from api.state import ApiState
from api.views import write_audit
from api.workloads.views import SubmittedView
from api.workloads.workload_queries import detail, submitted
from domain.array_elements import size
from domain.spec import WorkloadSpec
from infra.config.settings import Settings
from infra.db.enqueue import enqueue
from infra.db.models import Idempotency, Workload

JSON_TYPES = ("application/json",)
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


class _AlreadyAnswered(Exception):
    """A concurrent request with the same Idempotency-Key has created the workload; this transaction is rolled back."""


def parse(request: Request, body: bytes) -> Value:
    """Parses a document in the request's media type (`parse_as`)."""
    return parse_as(request.headers.get("content-type", ""), body)


def parse_as(content_type: str, body: bytes) -> Value:
    """Parses a document. CPU-bound: call it in a thread.

    Raises:
        Problem: 415 for an unsupported media type, 422 if the body is not YAML or JSON.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media in JSON_TYPES:
        load = load_json
    elif media in YAML_TYPES:
        load = load_yaml
    else:
        given = f"it is {media}" if media else "none is given"
        raise HttpProblem(
            ProblemType.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be application/yaml or application/json, {given}"
        )
    try:
        return load(body)
    except Malformed as error:
        raise HttpProblem(ProblemType.INVALID_DOCUMENT, str(error), errors=[FieldError("", str(error))]) from None


def admit(session: Session, caller: Caller, value: Value, settings: Settings) -> tuple[WorkloadSpec, str | None]:
    """Validates a document. Returns its specification, and why no region could ever hold the gang (None: one might).

    Raises:
        Problem: 422 with all errors.
    """
    draft = read_workload(value, caller.tenant)
    machines = fleet(session)
    check(session, draft, caller.tenant, machines)
    check_keep(draft, settings.tasks.keep_at_most_s)
    check_receivers(draft, settings.notify)
    if draft.problems:
        raise refuse_document(draft.problems)
    spec = draft.spec()
    return spec, never(spec, machines)


def submit(state: ApiState, caller: Caller, content_type: str, body: bytes, key: str | None) -> SubmittedView:
    """Submits the document in `body`, or returns the workload that an earlier request with the same `key` created.

    Raises:
        Problem: the document is invalid, or `key` was used with another body. Nothing was changed.
    """
    digest = hashlib.sha256(body).hexdigest()
    answered = _answered(state, caller, key, digest)
    if answered is not None:
        return answered
    value = parse_as(content_type, body)
    while True:
        try:
            with state.transaction() as session:
                spec, unheld = admit(session, caller, value, state.settings)
                return _insert(state, session, caller, spec, unheld, key, digest)
        except _AlreadyAnswered:
            answered = _answered(state, caller, key, digest)
            if answered is not None:
                return answered


def _answered(state: ApiState, caller: Caller, key: str | None, digest: str) -> SubmittedView | None:
    if key is None:
        return None
    with state.transaction() as session:
        known = session.get(Idempotency, (caller.id, key))
        if known is None:
            return None
        if known.body_sha256 != digest:
            raise mismatch(key, known.workload)
        row = session.get_one(Workload, known.workload)
        spec = WorkloadSpec.model_validate(row.spec)
        notes = notes_on_receivers(spec.notify, state.settings.notify)
        made = {**dict(detail(session, state.queue, row)), "never": never(spec, fleet(session))}
        return mask(session, caller, SubmittedView(**made, document_notes=notes))


def _insert(
    state: ApiState,
    session: Session,
    caller: Caller,
    spec: WorkloadSpec,
    held_by_none: str | None,
    key: str | None,
    digest: str,
) -> SubmittedView:
    state.queue_limit.require(session, spec.tenant)
    if spec.array is not None:
        most = state.settings.limits.elements_per_tenant
        state.queue_limit.require_elements(session, spec.tenant, size(spec.array.ranges), most)
    row = enqueue(session, spec, caller.submitter)
    if key is not None:
        # The insert waits for a concurrent request with the same key, and then conflicts with its row.
        known = insert(Idempotency).values(api_key=caller.id, key=key, body_sha256=digest, workload=row.id)
        done = session.execute(known.on_conflict_do_nothing().returning(Idempotency.workload)).first()
        if done is None:
            raise _AlreadyAnswered
    write_audit(session, caller, "workload.submit", row.id, tenant=row.tenant, name=row.name)
    notes = notes_on_receivers(spec.notify, state.settings.notify)
    return SubmittedView(**dict(submitted(session, row)), never=held_by_none, document_notes=notes)
