"""Endpoints for uploaded working directories: tar.gz archives, identified by tenant and SHA-256."""

import hashlib
from collections.abc import AsyncIterator, Collection
from functools import partial
from typing import Annotated

from fastapi import Path, Query, Request, Response
from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Caller, Submitter, Viewer
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, existing, invalid, not_found, over_limit, shown
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import View, write_audit
from infra.archives import ArchiveTree
from infra.db.tenants import Archive, ArchivePart, Tenant

MEDIA_TYPE = "application/gzip"
_FULL_RETRY_S = 60
_PART_BYTES, _USE_BYTES = 64 << 10, 1 << 10
_MAX_PATHS = 1 << 20
"""Maximum number of paths in an archive plus a document's files. The archive itself was checked at its upload."""
router = Router(prefix="/v1/archives", tags=["data"])

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="The SHA-256, in lower-case hexadecimal")]
TenantOf = Annotated[
    str | None, Query(description="Owner of the archive; with a key of a tenant, omit it or name that tenant")
]


class ArchiveView(View):
    """A stored archive. Documents refer to it as `workdir: {archive: <sha256>}`."""

    sha256: str
    tenant: str
    size_bytes: int


@router.head(
    "/{sha256}",
    summary="Check whether an archive exists",
    response_class=Response,
    responses={200: {"description": "The archive exists"}, **{s: {"description": d} for s, d in
               ((400, "Malformed"), (401, "No valid API key"), (403, "Not allowed"), (404, "No such archive"),
                (422, "Not valid"), (503, "Not available"))}},
)  # fmt: skip
def has_archive(sha256: Sha256, state: StateOf, caller: Viewer, tenant: TenantOf = None) -> Response:
    """Checks whether the archive was already uploaded."""
    owner = owner_of(caller, tenant)
    with state.transaction() as session:
        if not is_there(session, owner, sha256):
            raise not_found("archive", sha256)
    return Response()


@router.put(
    "/{sha256}",
    summary="Upload a working directory",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "contentMediaType": MEDIA_TYPE}}},
        }
    },
    responses=refusals(404),
)
async def put_archive(
    request: Request, sha256: Sha256, state: StateOf, caller: Submitter, tenant: TenantOf = None
) -> ArchiveView:
    """Stores a tar.gz archive of regular files and folders, and verifies its SHA-256. Idempotent."""
    owner = owner_of(caller, tenant)
    require_gzip(request)
    with state.uploads.reserve_upload(caller):
        body = await request.body()
        if not await state.threads.archives.run(partial(_is_new, state, owner, sha256, body)):
            return ArchiveView(sha256=sha256, tenant=owner, size_bytes=len(body))
        paths = await state.uploads.inspect(_whole(body))
        await state.threads.archives.run(partial(_insert, state, caller, owner, sha256, body, paths))
        return ArchiveView(sha256=sha256, tenant=owner, size_bytes=len(body))


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


def owner_of(caller: Caller, tenant: str | None) -> str:
    """Returns the tenant that will own the caller's upload.

    Raises:
        Problem: the query names no tenant, or not one of the caller.
    """
    if tenant is None and caller.tenant is None:
        raise invalid("query.tenant", "is missing; only a key with a tenant can omit it")
    owner = tenant or caller.tenant or ""
    caller.require_tenant(owner)
    return owner


def require_gzip(request: Request) -> None:
    """Checks the declared type of a body.

    Raises:
        HttpProblem: 415, the declared type is not gzip.
    """
    media = request.headers.get("content-type", MEDIA_TYPE).partition(";")[0].strip().lower()
    if media not in (MEDIA_TYPE, "application/x-gzip", "application/octet-stream"):
        raise HttpProblem(ProblemType.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be {MEDIA_TYPE}, not {shown(media)}")


def _is_new(state: ApiState, tenant: str, sha256: str, body: bytes) -> bool:
    """Returns whether the archive has to be stored, after all checks that do not read its contents."""
    found = hashlib.sha256(body).hexdigest()
    if found != sha256:
        raise invalid("path.sha256", f"the SHA-256 of the body is {found}: must equal the one in the path", sha256)
    with state.transaction() as session:
        existing(session, Tenant, tenant, "tenant")
        if is_there(session, tenant, sha256):
            return False
        require_space(state, session, tenant, len(body))
    return True


def _insert(state: ApiState, caller: Caller, tenant: str, sha256: str, body: bytes, paths: bytes) -> None:
    with state.transaction() as session:
        one_at_a_time(session, tenant)
        row = insert(Archive).values(tenant=tenant, sha256=sha256, body=body, paths=paths).on_conflict_do_nothing()
        if session.execute(row.returning(Archive.sha256)).first() is not None:
            require_space(state, session, tenant)
            write_audit(session, caller, "archive.put", sha256, tenant=tenant, size_bytes=len(body))


def one_at_a_time(session: Session, tenant: str) -> None:
    """Serialises the uploads of one tenant across all API processes, so that the size limit holds."""
    session.execute(text("select pg_advisory_xact_lock(hashtext('archive'), hashtext(:tenant))"), {"tenant": tenant})
    existing(session, Tenant, tenant, "tenant")


def require_space(state: ApiState, session: Session, tenant: str, more_bytes: int = 0) -> None:
    """Checks that a tenant may store `more_bytes` more than it has.

    A part counts as at least `_PART_BYTES`, and each use of a part in an archive as `_USE_BYTES`. This also limits the
    number of rows, and of the references that housekeeping reads.

    Raises:
        Problem: 429, because its archives would exceed the limit.
    """
    limit_bytes = state.settings.limits.archive_bytes_per_tenant
    uses = func.coalesce(func.jsonb_array_length(Archive.parts), 0)
    archives = func.sum(func.octet_length(Archive.body) + func.octet_length(Archive.paths) + uses * _USE_BYTES)
    parts = func.sum(func.greatest(func.octet_length(ArchivePart.body), _PART_BYTES))
    stored = session.scalar(select(archives).where(Archive.tenant == tenant)) or 0
    stored += session.scalar(select(parts).where(ArchivePart.tenant == tenant)) or 0
    if stored + more_bytes > limit_bytes:
        raise over_limit(
            "archive_bytes_per_tenant", limit_bytes,
            f"the archives of tenant {tenant} would need {stored + more_bytes} bytes; exclude files with .mizzenignore "
            "or ask an operator to raise the limit", _FULL_RETRY_S,
        )  # fmt: skip


def is_there(session: Session, tenant: str, sha256: str) -> bool:
    """Returns whether a tenant has uploaded an archive with this SHA-256."""
    key = (Archive.tenant == tenant, Archive.sha256 == sha256)
    return session.scalar(select(Archive.sha256).where(*key)) is not None


def check_files(session: Session, tenant: str, sha256: str, files: Collection[str]) -> None:
    """Checks that `files` (relative paths) can be written over an uploaded archive.

    Raises:
        BadArchive: a file has the path of a folder in the archive, or a path below a file of the archive.
    """
    ArchiveTree.load(session.get_one(Archive, (tenant, sha256)).paths, _MAX_PATHS).add_files(files)
