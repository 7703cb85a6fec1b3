"""Creates the FastAPI application from its routers, middleware and shared state."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from api import auth, bodies, health, limits, metrics, openapi, problems, reference, refusals, temporal_ui
from api.data import archive_parts, archives, instance, partitions, placement_runs, tables, usage
from api.fleet import (
    clusters,
    costs,
    instances,
    loops,
    machines,
    owner_view,
    pilots,
    pool_plans,
    pools,
    regions,
    removal,
    snapshot,
)
from api.people import audit, keys, secrets, tenants
from api.services import requests as service_requests
from api.services import routes as services
from api.services import traffic as service_traffic
from api.sessions import session_routes as sessions
from api.state import ApiState
from api.streams import events, logs
from api.workloads import actions, output_routes, queue, routes
from domain.version import VERSION
from infra.config.settings import Settings

_ROUTERS = (
    routes.router, actions.router, sessions.router, output_routes.router, queue.router, events.router, logs.router,
    tenants.router, secrets.router, keys.router, keys.open_router, audit.router, regions.router,
    clusters.router, costs.router, machines.router, owner_view.router, removal.router, pools.router,
    pool_plans.router,
    pilots.router, instances.router, loops.router, snapshot.router, tables.router, partitions.router, usage.router,
    instance.router, placement_runs.router,
    archives.router, archive_parts.router, services.router, service_requests.router, service_traffic.router,
    health.router, reference.router, temporal_ui.router,
)  # fmt: skip


def create_app(settings: Settings) -> FastAPI:
    """Creates the API. Postgres must be migrated before the first request; Temporal may be unavailable.

    Raises:
        ConfigurationError: the settings contain no database URL.
    """
    state = ApiState(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.relays.start()
        yield
        await state.aclose()

    # The routes are passed directly: `include_router` would create each route a second time during the first request,
    # and would search one router after another for every request.
    app = FastAPI(
        title="mizzen", version=VERSION, lifespan=lifespan, redirect_slashes=False, openapi_url=None, docs_url=None,
        redoc_url=None,
        routes=[route for router in _ROUTERS for route in router.routes],
    )  # fmt: skip
    app.state.mizzen = state
    problems.install(app)
    openapi.install(app, routes.SCHEMAS | services.SCHEMAS | events.SCHEMAS)
    # The middleware that is added last receives a request first.
    app.add_middleware(bodies.BodyLimits, settings=settings.api, limits=settings.limits)
    app.add_middleware(limits.Admission, settings=settings.limits)
    app.add_middleware(auth.Authentication, logins=state.logins, warning_s=settings.api.key_warning_s)
    app.add_middleware(refusals.Noting, recorder=state.refusals)
    app.add_middleware(metrics.Counting, metrics=state.metrics)
    return app
