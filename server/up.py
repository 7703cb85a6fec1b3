"""`mizzen up`: runs the embedded stack in the foreground."""

import asyncio
import contextlib

import click
from sqlalchemy import select

from capacity.providers.registry import check_providers
from infra.bootstrap import OPERATOR_KEY_FILE
from infra.config.settings import Settings
from infra.db.console_sessions import new_link
from infra.db.session import open_engine, transaction
from infra.db.tenants import ApiKey
from infra.errors import ConfigurationError
from infra.keys import hash_api_key
from infra.process_exit import stop_signals
from infra.stack.embedded import EmbeddedStack
from infra.stack.fleet import Fleet, load_fleet
from infra.stack.fork_server import ForkServer
from infra.stack.lock import data_folder
from mizzen.objects.urls import check_url
from mizzen_client.cli.formats import plural
from mizzen_client.cli.setup_commands import open_browser
from server.agents import FleetIsolation, fleet_isolation


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # The terminal may have been closed; the stack must still save and stop.
        click.echo(line, err=True)


_PARTS = (
    "activities.roles",
    "api.serve",
    "console.application",
    "proxies.gateway.gateway_server",
    "server.agents",
)
"""What the parts import (`server.commands`)."""


def fork_server() -> ForkServer:
    """Returns a server that forks the parts of the stack. To be called before anything is read or started."""
    return ForkServer.start("server", _PARTS)


async def run_up(
    settings: Settings,
    forks: ForkServer | None = None,
    *,
    forget_unreadable_secrets: bool = False,
    console: bool = False,
) -> int:
    """Starts the stack, runs until Ctrl-C, SIGTERM or SIGHUP, and stops all its processes.

    Args:
        settings: the settings.
        forks: starts the parts; None: they are started as new processes.
        forget_unreadable_secrets: secrets that the master key cannot decrypt are deleted; by default they are an error.
        console: the console is opened in a browser, logged in with the operator's key.

    Raises:
        MizzenError: the stack cannot start, for a reason that the operator can fix, or a part of it cannot start again.
    """
    fleet = load_fleet(settings.fleet)
    _check_stores(fleet)
    check_providers(settings)
    stop, hurry = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        hurry.set() if stop.is_set() else stop.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, asked)
    with data_folder(settings.data_dir) as folder:
        isolation = fleet_isolation(settings, fleet, folder)
        stack = EmbeddedStack(
            settings,
            fleet,
            folder,
            _say,
            forget_unreadable_secrets=forget_unreadable_secrets,
            why_shared=isolation.why_shared,
            forks=forks,
        )
        starting = asyncio.create_task(stack.start())
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(stack.supervisor.until_failed())
        try:
            await asyncio.wait({starting, stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                _show(stack, isolation)
                if console:
                    await asyncio.to_thread(_open_console, stack)
                await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
                _say("stopping: workloads save checkpoints")
            if failed.done():
                failed.result()
        finally:
            for task in (stopped, starting, failed):
                task.cancel()
            await asyncio.gather(starting, failed, return_exceptions=True)
            await stack.stop(hurry=hurry)
    _say("mizzen has stopped")
    return 0


def _open_console(stack: EmbeddedStack) -> None:
    """Prints a link that logs one browser in with the operator's key, and opens it if there is a window system."""
    sha256 = hash_api_key((stack.data_dir / OPERATOR_KEY_FILE).read_text().strip())
    engine = open_engine(stack.database_url, pool_size=1)
    try:
        with transaction(engine) as session:
            key = session.scalar(select(ApiKey.id).where(ApiKey.sha256 == sha256))
            link = None if key is None else f"{stack.api_url}{new_link(session, key)}"
    finally:
        engine.dispose()
    if link is None:
        _say(f"  console    log in at {stack.api_url}/console: {OPERATOR_KEY_FILE} has a key of another database")
        return
    _say(f"  console    {link}  (works once, within five minutes)")
    open_browser(link)


def _check_stores(fleet: Fleet) -> None:
    """Raises ConfigurationError if the URL of a cluster's store is malformed."""
    for region in fleet.regions:
        for cluster in region.clusters:
            if cluster.store_url is not None:
                try:
                    check_url(cluster.store_url)
                except ValueError as error:
                    raise ConfigurationError(f"cluster {region.name}/{cluster.name}: store_url: {error}") from None


def _show(stack: EmbeddedStack, isolation: FleetIsolation) -> None:
    key_file = stack.data_dir / OPERATOR_KEY_FILE
    machines = stack.fleet.machines()
    _say(f"mizzen is up: {plural(len(stack.fleet.regions), 'region')}, {plural(len(machines), 'machine')}")
    _say(f"  API        {stack.api_url}  (docs: {stack.api_url}/docs)")
    if stack.ui_url:
        _say(f"  Temporal   {stack.ui_url}")
    if machines:
        _say(f"  isolation  {isolation}")
    _say(f"  logs       {stack.data_dir / 'run' / 'log'}")
    _say(f"  first use  mizzen login {stack.api_url} --key - < {key_file}")
    _say("Ctrl-C saves workloads and stops mizzen; they continue at the next `mizzen up` with the same folder.")
