"""Uploaded working directories: tar.gz archives by their SHA-256, for one tenant each."""

import gzip
import hashlib
import io
import tarfile
import zlib
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, Submitter, Viewer
from api.openapi import refusals
from api.problems import Kind, Problem, invalid, not_found, shown
from api.state import State, StateOf
from api.views import View, write_audit
from infra.db.models import Archive, Tenant

MAX_MEMBERS = 20_000
MAX_UNPACKED_BYTES = 512 << 20
MEDIA_TYPE = "application/gzip"
_MAX_READ_BYTES = 16 << 20
router = APIRouter(prefix="/v1/archives", tags=["data"])

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="The SHA-256, in lower-case hexadecimal")]
TenantOf = Annotated[
    str | None, Query(description="Whose archive it is; a key with a tenant may leave it out, and has no other choice")
]


class ArchiveView(View):
    """An archive that is there. Documents refer to it as `workdir: {archive: <sha256>}`."""

    sha256: str
    tenant: str
    size_bytes: int


@router.head(
    "/{sha256}",
    summary="Whether an archive is there",
    response_class=Response,
    responses={200: {"description": "It is there"}, **{s: {"description": d} for s, d in
               ((400, "Malformed"), (401, "No valid API key"), (403, "Not allowed"), (404, "It is not there"),
                (422, "Not valid"), (503, "Not available"))}},
)  # fmt: skip
def has_archive(sha256: Sha256, state: StateOf, caller: Viewer, tenant: TenantOf = None) -> Response:
    """Whether the archive need not be uploaded."""
    owner = _owner(caller, tenant)
    with state.transaction() as session:
        if not _is_there(session, owner, sha256):
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
    """Takes a tar.gz of regular files and folders, checked against its SHA-256. Uploading it again changes nothing."""
    owner = _owner(caller, tenant)
    media = request.headers.get("content-type", MEDIA_TYPE).partition(";")[0].strip().lower()
    if media not in (MEDIA_TYPE, "application/x-gzip", "application/octet-stream"):
        raise Problem(Kind.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be {MEDIA_TYPE}, it is {shown(media)}")
    body = await request.body()
    return await run_in_threadpool(_put, state, caller, owner, sha256, body)


def _owner(caller: Caller, tenant: str | None) -> str:
    if tenant is None and caller.tenant is None:
        raise invalid("query.tenant", "give the tenant; only a key that has a tenant may leave it out")
    owner = tenant or caller.tenant or ""
    caller.require_tenant(owner)
    return owner


def _put(state: State, caller: Caller, tenant: str, sha256: str, body: bytes) -> ArchiveView:
    found = hashlib.sha256(body).hexdigest()
    if found != sha256:
        raise invalid("path.sha256", f"the body's SHA-256 is {found}", sha256)
    check_archive(body)
    with state.transaction() as session:
        if session.get(Tenant, tenant) is None:
            raise not_found("tenant", tenant)
        row = insert(Archive).values(tenant=tenant, sha256=sha256, body=body).on_conflict_do_nothing()
        if session.execute(row.returning(Archive.sha256)).first() is not None:
            write_audit(session, caller, "archive.put", sha256, tenant=tenant, size_bytes=len(body))
    return ArchiveView(sha256=sha256, tenant=tenant, size_bytes=len(body))


def _is_there(session: Session, tenant: str, sha256: str) -> bool:
    key = (Archive.tenant == tenant, Archive.sha256 == sha256)
    return session.scalar(select(Archive.sha256).where(*key)) is not None


class _Reader(gzip.GzipFile):
    """Refuses the reads by which a forged header would fill the memory, and stops after the most that is unpacked."""

    left = MAX_UNPACKED_BYTES

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ_BYTES:
            raise invalid("", f"a header in the archive asks for {size} bytes")
        text = super().read(size)
        self.left -= len(text)
        if self.left < 0:
            raise invalid("", f"the archive unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        return text


def check_archive(body: bytes) -> None:
    """Refuses what agents would not unpack, while the one who uploads it can still be told.

    Raises:
        Problem: it is no tar.gz, or a member is not a regular file or folder, or leads out of the folder.
    """
    names = 0
    try:
        with _Reader(fileobj=io.BytesIO(body)) as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for member in tar:
                names += 1
                parts = member.name.removeprefix("./").rstrip("/").split("/")
                if names > MAX_MEMBERS:
                    raise invalid("", f"the archive has more than {MAX_MEMBERS} members")
                if not (member.isreg() or member.isdir()):
                    raise invalid("", "a member is neither a file nor a folder; links are refused", member.name)
                is_root = member.isdir() and parts in ([""], ["."])
                if not is_root and any(part in ("", ".", "..") or "\0" in part for part in parts):
                    raise invalid("", "a member leads out of the archive's folder", member.name)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise invalid("", f"the body is not a tar.gz archive: {error}") from None
