"""Endpoints for working directories that are uploaded in parts: only the parts that changed are sent again."""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import Request
from pydantic import Field, StringConstraints
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Caller, Submitter
from api.bodies import Body, JsonOnly
from api.data.archives import (
    MEDIA_TYPE,
    ArchiveView,
    Sha256,
    TenantOf,
    is_there,
    one_at_a_time,
    owner_of,
    require_gzip,
    require_space,
)
from api.openapi import refusals
from api.problems import busy, invalid
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import View, write_audit
from infra.db.archive_parts import part_sizes
from infra.db.tenants import Archive, ArchivePart

MOST_PARTS = 5000
"""Maximum number of parts. The client's parts have at least 1 MiB before compression, or precede one that has."""
_RETRY_S = 1
router = Router(prefix="/v1/archives", tags=["data"])


class ArchiveParts(Body):
    """The parts of an archive, in order. The archive is their sequence."""

    parts: Annotated[
        list[Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]], Field(min_length=1, max_length=MOST_PARTS)
    ]


class AssembledView(View):
    """The result of assembling an archive: the parts that are missing, if any."""

    missing: list[str] = Field(description="Parts to upload first; empty: the archive exists")


@router.put(
    "/parts/{sha256}",
    summary="Upload a part of a working directory",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "contentMediaType": MEDIA_TYPE}}},
        }
    },
    responses=refusals(404),
)
async def put_part(
    request: Request, sha256: Sha256, state: StateOf, caller: Submitter, tenant: TenantOf = None
) -> ArchiveView:
    """Stores a part of an archive, which is one gzip member, and verifies its SHA-256. Idempotent.

    A part that no archive uses is deleted after a day.
    """
    owner = owner_of(caller, tenant)
    require_gzip(request)
    with state.uploads.reserve_upload(caller):
        body = await request.body()
        await state.threads.archives.run(partial(_put, state, owner, sha256, body))
        return ArchiveView(sha256=sha256, tenant=owner, size_bytes=len(body))


def _put(state: ApiState, tenant: str, sha256: str, body: bytes) -> None:
    found = hashlib.sha256(body).hexdigest()
    if found != sha256:
        raise invalid("path.sha256", f"the SHA-256 of the body is {found}: must equal the one in the path", sha256)
    with state.transaction() as session:
        one_at_a_time(session, tenant)
        if not _use(session, tenant, [sha256]):
            session.execute(insert(ArchivePart).values(tenant=tenant, sha256=sha256, body=body))
            require_space(state, session, tenant)


def _use(session: Session, tenant: str, parts: Sequence[str]) -> set[str]:
    """Returns which of the parts exist, and marks these as used, so that they are kept for another day."""
    own = (ArchivePart.tenant == tenant, ArchivePart.sha256.in_(parts))
    used = update(ArchivePart).where(*own).values(used_at=func.now())
    return set(session.scalars(used.returning(ArchivePart.sha256)))


@router.post("/{sha256}", summary="Assemble a working directory", dependencies=[JsonOnly], responses=refusals(404))
async def assemble(
    sha256: Sha256, body: ArchiveParts, state: StateOf, caller: Submitter, tenant: TenantOf = None
) -> AssembledView:
    """Assembles an archive from parts, verifying its SHA-256 and content, or returns missing parts. Idempotent."""
    owner = owner_of(caller, tenant)
    with state.uploads.reserve_upload(caller):
        missing = await state.threads.archives.run(partial(_missing, state, owner, sha256, body.parts))
        if missing is None or missing:
            return AssembledView(missing=missing or [])
        digest = hashlib.sha256()

        async def pieces() -> AsyncIterator[bytes]:
            for part in body.parts:
                yield await state.threads.archives.run(partial(_part, state, owner, part, digest.update))

        paths = await state.uploads.inspect(pieces())
        if digest.hexdigest() != sha256:
            raise invalid("path.sha256", f"the SHA-256 of the parts together is {digest.hexdigest()}", sha256)
        missing = await state.threads.archives.run(partial(_insert, state, caller, owner, sha256, body.parts, paths))
        return AssembledView(missing=missing)


def _missing(state: ApiState, tenant: str, sha256: str, parts: Sequence[str]) -> list[str] | None:
    """Returns the parts that the tenant has not uploaded; None: it has the archive."""
    with state.transaction() as session:
        one_at_a_time(session, tenant)
        if is_there(session, tenant, sha256):
            return None
        _use(session, tenant, parts)  # The client uploads the missing parts and assembles the archive within a day.
        sizes = part_sizes(session, tenant, parts)
        limit_bytes = state.settings.api.max_workdir_bytes
        if (size_bytes := sum(sizes.get(part, 0) for part in parts)) > limit_bytes:
            message = f"the archive would have {size_bytes} bytes or more; at most {limit_bytes} are allowed"
            raise invalid("parts", f"{message} (api.max_workdir_bytes)")
        return [part for part in dict.fromkeys(parts) if part not in sizes]


def _part(state: ApiState, tenant: str, sha256: str, read: Callable[[bytes], None]) -> bytes:
    with state.transaction() as session:
        own = (ArchivePart.tenant == tenant, ArchivePart.sha256 == sha256)
        body = session.scalar(select(ArchivePart.body).where(*own))
    if body is None:
        raise busy(f"part {sha256} was deleted while the archive was made", _RETRY_S)
    read(body)
    return body


def _insert(state: ApiState, caller: Caller, tenant: str, sha256: str, parts: Sequence[str], paths: bytes) -> list[str]:
    """Stores the archive; returns the parts that were deleted meanwhile, if there are any."""
    with state.transaction() as session:
        one_at_a_time(session, tenant)
        # The row locks prevent the deletion of the parts until the archive that refers to them is inserted.
        own = (ArchivePart.tenant == tenant, ArchivePart.sha256.in_(parts))
        there = set(session.scalars(select(ArchivePart.sha256).where(*own).with_for_update(read=True, key_share=True)))
        if missing := [part for part in dict.fromkeys(parts) if part not in there]:
            return missing
        row = insert(Archive).values(tenant=tenant, sha256=sha256, body=b"", parts=list(parts), paths=paths)
        if session.execute(row.on_conflict_do_nothing().returning(Archive.sha256)).first() is not None:
            require_space(state, session, tenant)
            write_audit(session, caller, "archive.put", sha256, tenant=tenant, parts=len(parts))
        return []
