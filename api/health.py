"""Endpoints for liveness, readiness and metrics."""

import asyncio
from functools import lru_cache, partial
from typing import Any

from fastapi import Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from api.auth import Viewer
from api.metrics import ServiceCollector
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, of_database
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import View
from infra.db import migrate
from infra.db.restored_databases import held_since
from infra.db.rounds import loop_states
from infra.db.session import transaction
from infra.errors import ConfigurationError

_TEMPORAL_S = 2.0
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
router = Router(tags=["service"])


class HealthView(View):
    """Liveness of the process."""

    status: str = Field(examples=["ok"])


class ReadyView(View):
    """State of the services on which the process depends."""

    status: str = Field(examples=["ready"])
    database: str
    schema_revision: str
    temporal: str = Field(description="ok or unreachable; without Temporal, requested changes are delayed")
    loops: str = Field(
        description="ok, or the number of periodic loops that fail or are late; `GET /v1/loops` names them",
        examples=["ok", "1 of 8 is failing or late"],
    )
    held: bool = Field(
        description="whether the database was restored from a backup and waits for `mizzen adopt`; no worker runs then"
    )


@router.head("/healthz", include_in_schema=False)  # Some load balancers check with HEAD.
@router.get("/healthz", summary="Check liveness", responses=refusals(503))
async def healthz(state: StateOf) -> HealthView:
    """Checks whether a request gets a thread in time; Postgres and Temporal are not checked.

    503 means that all threads for requests, or all threads that look up keys, have been busy for `limits.health_s`. If
    this state persists, restart the process.
    """
    within_s = state.settings.limits.health_s
    if not await state.threads.serving(within_s):
        raise HttpProblem(
            ProblemType.BUSY, f"no thread for requests was free within {within_s:g} s: requests are not served"
        )
    return HealthView(status="ok")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Check readiness", responses=refusals(503))
async def readyz(state: StateOf) -> ReadyView:
    """Checks whether Postgres responds and has the required schema revision, and whether Temporal responds."""
    temporal = asyncio.create_task(_temporal(state))
    try:
        revision = await state.threads.service.run(partial(migrate.current, state.authentication_engine))
        loops, held = "", False
        if revision == _head():
            loops, held = await state.threads.service.run(partial(_standing, state.authentication_engine))
    except SQLAlchemyError as error:
        temporal.cancel()
        raise of_database(error) from None
    reached = await temporal
    if revision != _head():
        raise HttpProblem(
            ProblemType.NOT_READY,
            f"the database schema is at revision {revision}, but this process needs {_head()}: migrate the database",
        )
    return ReadyView(status="ready", database="ok", schema_revision=revision, temporal=reached, loops=loops, held=held)


def _standing(engine: Engine) -> tuple[str, bool]:
    """Returns the state of the loops for `ReadyView`, and whether the database waits for `mizzen adopt`."""
    with transaction(engine) as session:
        found, now_s = loop_states(session)
        held = held_since(session) is not None
    wrong = sum(loop.judge(now_s) != "ok" for loop in found.values())
    return f"{wrong} of {len(found)} {'is' if wrong == 1 else 'are'} failing or late" if wrong else "ok", held


@lru_cache(maxsize=1)
def _head() -> str:
    return migrate.head()


async def _temporal(state: ApiState) -> str:
    try:
        async with asyncio.timeout(_TEMPORAL_S):
            client = await state.temporal()
            await client.service_client.check_health()
    except ConfigurationError:
        return "not configured"
    except Exception:  # Every error of the SDK means that Temporal is unreachable.
        return "unreachable"
    return "ok"


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=_METRICS,
)
async def metrics(state: StateOf) -> Response:
    """Returns metrics in the Prometheus text format. They name no tenant and no service: see `GET /v1/metrics`."""
    text = await state.threads.service.run(partial(generate_latest, state.metrics.registry))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/v1/metrics",
    summary="Prometheus metrics of services and of GPUs",
    response_class=Response,
    responses=_METRICS,
)
def metrics_of_services(state: StateOf, caller: Viewer) -> Response:
    """Returns the metrics of each service, and of each task's GPUs, that the key may see, in the Prometheus format."""
    return Response(generate_latest(ServiceCollector(state.engine, caller.tenant)), media_type=CONTENT_TYPE_LATEST)
