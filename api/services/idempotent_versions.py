"""Idempotent requests that create a version of a service (`Idempotency-Key`)."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Caller
from api.idempotency import check_key, mismatch
from api.masking import mask
from api.services.service_queries import detail_fields
from api.services.views import ServiceChanged
from api.state import ApiState
from domain.service import ServiceSpec
from infra.db import published_queue
from infra.db.services import ServiceRow, ServiceVersion, continue_replicas


@dataclass(frozen=True)
class Asked:
    """A request that creates a version of a service."""

    body: bytes
    key: str | None
    """Its Idempotency-Key."""
    sha256: str
    """The digest of its body and its parameters."""

    @classmethod
    def of(cls, key: str | None, body: bytes, *parameters: str | None) -> "Asked":
        """Returns a request.

        Raises:
            Problem: 400, the key is invalid.
        """
        return cls(body, check_key(key), hashlib.sha256(repr(parameters).encode() + body).hexdigest())


class _AlreadyMade(Exception):
    """A concurrent request with the same key has created the version; this transaction is rolled back."""


def once(
    state: ApiState, caller: Caller, asked: Asked, make: Callable[[Session], ServiceChanged]
) -> ServiceChanged:  # fmt: skip
    """Returns the response of an earlier request with the same key, else the result of `make`, called in a transaction.

    Raises:
        Problem: 422, the key was used for another request; or any error of `make`. Nothing was changed.
    """
    while True:
        try:
            with state.transaction() as session:
                return answer_again(session, state.queue, caller, asked) or make(session)
        except _AlreadyMade:
            continue


def answer_again(
    session: Session, queue: published_queue.Newest, caller: Caller, asked: Asked
) -> ServiceChanged | None:
    """Returns the response for the version that an earlier request with the same key created; None: no such request.

    Raises:
        Problem: 422, the key was used for another request.
    """
    if asked.key is None:
        return None
    same = ServiceVersion.created_by == caller.id, ServiceVersion.idempotency_key == asked.key
    known = session.scalar(select(ServiceVersion).where(*same))
    if known is None:
        return None
    row = session.get_one(ServiceRow, known.service)
    if known.request_sha256 != asked.sha256:
        raise mismatch(asked.key, f"version {known.version} of service {row.name}")
    fields = {**detail_fields(session, queue, row), "version": known.version, "spec": known.spec}
    return mask(session, caller, ServiceChanged(**fields, document_notes=[]))


def add_version(session: Session, caller: Caller, row: ServiceRow, spec: ServiceSpec, asked: Asked) -> None:
    """Inserts the version of a service that a request creates.

    The insert waits for a concurrent request with the same key; if that commits, `once` returns its version.
    """
    session.flush()
    written = session.execute(
        insert(ServiceVersion)
        .values(
            service=row.id,
            version=row.version,
            spec=spec.model_dump(mode="json"),
            created_by=caller.id,
            idempotency_key=asked.key,
            request_sha256=asked.sha256 if asked.key else None,
        )
        .on_conflict_do_nothing(
            index_elements=["created_by", "idempotency_key"],
            index_where=ServiceVersion.idempotency_key.is_not(None),
        )
        .returning(ServiceVersion.version)
    ).first()
    if written is None:
        raise _AlreadyMade
    continue_replicas(session, row, spec)
