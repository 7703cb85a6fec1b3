"""Endpoints that list and read the outputs that agents have stored of a workload's tasks (`domain.output_manifest`)."""

import hashlib
import logging
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from fastapi import Path, Query
from fastapi.responses import StreamingResponse
from pydantic import Field, ValidationError
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, Viewer
from api.fleet.storage import STORAGE_ERRORS, storage_unavailable
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, not_found
from api.routing import Router
from api.state import ApiState, StateOf
from api.streams.stream import Stream
from api.views import View
from api.workloads.workload_queries import find
from domain import ids
from domain.output_manifest import MAX_MANIFEST_BYTES, PART_BYTES, OutputManifest
from infra.db.models import Attempt, Region
from mizzen.objects import MissingObject, ObjectStore

MEDIA_TYPE = "application/x-tar"
MOST_OUTPUTS = 1000
"""Maximum number of outputs in one response."""
_MAX_NUMBER = 1 << 31
router = Router(prefix="/v1/workloads", tags=["workloads"])
_log = logging.getLogger(__name__)

OutputName = Annotated[str, Path(pattern=ids.NAME_PATTERN, description="The name in the document")]
Job = Annotated[str, Query(pattern=ids.NAME_PATTERN)]
Number = Annotated[int, Query(ge=0, le=_MAX_NUMBER)]


class OutputView(View):
    """An output of one task of one attempt, or the reason why it was not stored."""

    name: str
    job: str
    task: int
    attempt: int
    path: str = Field(description="The path in the working directory of the task")
    stored_at: datetime
    files: int = Field(description="The number of files, folders and links")
    size_bytes: int = Field(description="The size of the files together")
    archive_bytes: int = Field(description="The size of the tar archive")
    left_out: list[str] = Field(description="Entries that were not stored, with the reasons; at most 5")
    left_out_count: int
    error: str | None = Field(description="Why it was not stored; null: it was")


class OutputList(View):
    """The outputs of a workload, sorted by name, job, task and attempt."""

    items: list[OutputView]
    has_more: bool = Field(description="There are more than 1000; give a name, job or task")


@router.get("/{id}/outputs", summary="List a workload's outputs", responses=refusals(404, 410))
async def list_outputs(
    id: str,
    state: StateOf,
    caller: Viewer,
    name: Annotated[str | None, Query(description="Only outputs of this name")] = None,
    job: Annotated[str | None, Query(description="Only outputs of tasks of this job")] = None,
    task: Annotated[int | None, Query(ge=0, le=_MAX_NUMBER, description="Only outputs of this task")] = None,
) -> OutputList:
    """Lists a workload's outputs. One that could not be stored has an `error`.

    The newest attempt of a task that has stored an output replaces what earlier attempts have stored.
    """
    workload, buckets = await run_in_threadpool(_buckets, state, caller, id)
    found: dict[str, OutputView] = {}
    for number, url in enumerate(buckets):
        try:
            found |= await state.threads.stores.run(partial(_read_all, state.store(url), workload, name, job, task))
        except STORAGE_ERRORS as error:
            if number == 0:  # The output of the newest attempt.
                raise storage_unavailable(error) from None
    items = sorted(found.values(), key=lambda one: (one.name, one.job, one.task, one.attempt))
    return OutputList(items=items[:MOST_OUTPUTS], has_more=len(items) > MOST_OUTPUTS)


@router.get(
    "/{id}/outputs/{name}",
    response_class=StreamingResponse,
    summary="Read an output of a task",
    responses={
        200: {
            "description": "A tar archive of `archive_bytes` bytes. A shorter response was interrupted: continue "
            "with `start`.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
        **refusals(404, 410),
    },
)
async def read_output(
    id: str,
    name: OutputName,
    state: StateOf,
    caller: Viewer,
    *,
    job: Job,
    task: Number,
    attempt: Number,
    start: Annotated[int, Query(ge=0, le=1 << 53, description="The first byte to send")] = 0,
) -> Stream:
    """Returns the files of an output as a tar archive. The response ends early at a damaged part."""
    workload, buckets = await run_in_threadpool(_buckets, state, caller, id)
    place = (workload, attempt, job, task, name)
    for url in buckets:
        store = state.store(url)
        try:
            manifest = await state.threads.stores.run(partial(_read, store, ids.output_manifest_key(*place)))
        except STORAGE_ERRORS as error:
            raise storage_unavailable(error) from None
        if manifest is not None and not manifest.error:
            return Stream(
                _parts(state, store, place, manifest, start), MEDIA_TYPE, state.hub.admit(caller, waits=False)
            )
    raise not_found(f"output of task {job}/{task} in attempt {attempt} of workload {workload}", name)


def _buckets(state: ApiState, caller: Caller, workload: str) -> tuple[str, list[str]]:
    """Returns the workload's id, and the buckets of its attempts, the newest attempt first."""
    with state.transaction() as session:
        row = find(session, caller, workload)
        if row.expired_at is not None:
            message = f"the outputs of workload {row.id} were deleted at {row.expired_at:%Y-%m-%d %H:%M %Z}"
            raise HttpProblem(ProblemType.GONE, message)
        regions = select(Region.bucket_url).join(Attempt, Attempt.region == Region.name)
        found = session.scalars(regions.where(Attempt.workload == row.id).order_by(Attempt.attempt.desc()))
        return row.id, list(dict.fromkeys(found))


def _read_all(
    store: ObjectStore, workload: str, name: str | None, job: str | None, task: int | None
) -> dict[str, OutputView]:
    """Returns the matching outputs in a store by the key of their manifest, at most one more than `MOST_OUTPUTS`."""
    found: dict[str, OutputView] = {}
    prefix = ids.output_manifests_prefix(workload)
    for info in store.list(prefix):
        parts = info.key.removeprefix(prefix).removesuffix(".json").split("/")
        if len(parts) != 4 or not (parts[1].isdigit() and parts[3].isdigit()):
            continue
        own_job, own_task, own_name, attempt = parts[0], int(parts[1]), parts[2], int(parts[3])
        if name not in (None, own_name) or job not in (None, own_job) or task not in (None, own_task):
            continue
        manifest = _read(store, info.key)
        if manifest is not None:
            found[info.key] = _view(manifest, own_name, own_job, own_task, attempt)
        if len(found) > MOST_OUTPUTS:
            break
    return found


def _read(store: ObjectStore, key: str) -> OutputManifest | None:
    """Returns a manifest; None: there is none, or it is not valid."""
    try:
        return OutputManifest.model_validate_json(store.get_range(key, 0, MAX_MANIFEST_BYTES))
    except MissingObject:
        return None
    except ValidationError as error:
        _log.warning("the manifest %s is not valid: %s", key, error)
        return None


def _view(manifest: OutputManifest, name: str, job: str, task: int, attempt: int) -> OutputView:
    return OutputView(
        name=name,
        job=job,
        task=task,
        attempt=attempt,
        stored_at=datetime.fromtimestamp(manifest.stored_at_s, UTC),
        archive_bytes=sum(part.size_bytes for part in manifest.parts),
        error=manifest.error or None,
        **manifest.model_dump(include={"path", "files", "size_bytes", "left_out", "left_out_count"}),
    )


async def _parts(
    state: ApiState, store: ObjectStore, place: tuple[str, int, str, int, str], manifest: OutputManifest, start: int
) -> AsyncGenerator[bytes, None]:
    """Yields the archive from the byte `start` on."""
    for number, part in enumerate(manifest.parts):
        if start >= part.size_bytes:
            start -= part.size_bytes
            continue
        key = ids.output_part_key(*place, number)
        try:
            body = await state.threads.stores.run(partial(store.get_range, key, 0, PART_BYTES))
        except (*STORAGE_ERRORS, MissingObject) as error:
            _log.warning("%s cannot be read: %r", key, error)
            return
        if hashlib.sha256(body).hexdigest() != part.sha256:
            _log.error("%s was changed or damaged: its SHA-256 is not that of its manifest", key)
            return
        yield body[start:]
        start = 0
