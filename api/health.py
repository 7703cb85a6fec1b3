"""Whether this process lives, whether it can serve, and its metrics."""

import asyncio
from functools import lru_cache, partial

from fastapi import Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field
from sqlalchemy.exc import SQLAlchemyError

from api.openapi import refusals
from api.problems import Kind, Problem, of_database
from api.routing import Router
from api.state import State, StateOf
from api.views import View
from infra.db import migrate
from infra.errors import ConfigurationError

_TEMPORAL_S = 2.0
router = Router(tags=["service"])


class HealthView(View):
    """The process serves requests."""

    status: str = Field(examples=["ok"])


class ReadyView(View):
    """What the process depends on."""

    status: str = Field(examples=["ready"])
    database: str
    schema_revision: str
    temporal: str = Field(description="ok or unreachable; the API serves without it, and what is asked for waits")


@router.get("/healthz", summary="Whether the process serves requests", responses=refusals(503))
async def healthz(state: StateOf) -> HealthView:
    """Whether a request would get a thread in time, whatever the process depends on.

    503 means that all threads for requests, or those that look up keys, have been busy for `limits.health_s`: a restart
    helps if it stays so.
    """
    within_s = state.settings.limits.health_s
    if not await state.threads.serving(within_s):
        raise Problem(Kind.BUSY, f"no thread for requests was free for {within_s:g} s: requests are not served")
    return HealthView(status="ok")


@router.get("/readyz", summary="Whether the process can serve", responses=refusals(503))
async def readyz(state: StateOf) -> ReadyView:
    """Whether Postgres answers with the schema that this process knows, and whether Temporal answers."""
    temporal = asyncio.create_task(_temporal(state))
    try:
        revision = await state.threads.service.run(partial(migrate.current, state.authentication_engine))
    except SQLAlchemyError as error:
        temporal.cancel()
        raise of_database(error) from None
    reached = await temporal
    if revision != _head():
        raise Problem(
            Kind.NOT_READY, f"the database's schema is at revision {revision}, this process needs {_head()}: migrate it"
        )
    return ReadyView(status="ready", database="ok", schema_revision=revision, temporal=reached)


@lru_cache(maxsize=1)
def _head() -> str:
    return migrate.head()


async def _temporal(state: State) -> str:
    try:
        async with asyncio.timeout(_TEMPORAL_S):
            client = await state.temporal()
            await client.service_client.check_health()
    except ConfigurationError:
        return "not configured"
    except Exception:  # whatever the SDK raises means the same here
        return "unreachable"
    return "ok"


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={200: {"description": "Numbers", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(state: StateOf) -> Response:
    """Numbers in Prometheus's text format. They name regions, GPU types and phases, and nothing of any tenant's."""
    text = await state.threads.service.run(partial(generate_latest, state.metrics.registry))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
