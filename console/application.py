"""Creates the application of the API process: the API, and the console at `/console`."""

from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from api import app as api_app
from console import (
    bulk_pages,
    capacity_page,
    changes,
    fleet_pages,
    issuer_logins,
    lending_pages,
    list_pages,
    logins,
    overview,
    pages,
    past_page,
    queue_page,
    table_pages,
    what_if_page,
    workload_pages,
)
from console.cookies import BrowserLogins, Signer
from console.shared_parts import SharedParts
from infra.config.settings import Settings

_ROUTERS = (
    logins.router, logins.link_router, issuer_logins.router, changes.router, overview.router, queue_page.router,
    bulk_pages.router, workload_pages.router, fleet_pages.router, past_page.router, list_pages.router,
    table_pages.router, capacity_page.router, lending_pages.router, what_if_page.router, pages.router,
)  # fmt: skip


def create_app(settings: Settings) -> FastAPI:
    """Creates the API with the console (`api.app.create_app`).

    Raises:
        ConfigurationError: the settings contain no database URL.
    """
    app = api_app.create_app(settings)
    app.state.console = Signer(settings.master_key_path)
    # Pages are not compressed: they have the token of a login beside texts of others, so their size would tell it.
    files = GZipMiddleware(StaticFiles(directory=Path(__file__).parent / "static"), minimum_size=1000)
    static = Mount(f"{pages.TOP}/static", files)
    start = Route("/", RedirectResponse(pages.TOP, 303), include_in_schema=False)
    app.router.routes += [start, static, *(route for router in _ROUTERS for route in router.routes)]
    pages.install(app)
    app.add_middleware(SharedParts)
    app.add_middleware(BrowserLogins, logins=app.state.mizzen.logins, signer=app.state.console)
    return app
