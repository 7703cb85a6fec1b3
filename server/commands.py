"""`mizzen up`, `init`, `api`, `worker`, `agent`, `gateway` and more: added to the SDK's command by entry points."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from domain.isolation import Isolation
from infra.errors import ConfigurationError, MizzenError, StackError
from infra.memory import loading
from infra.process_exit import end_process
from mizzen_client.cli.numbers import Number
from server.options import FILE, RunOptions, argument, included, option, takes

if TYPE_CHECKING:
    from infra.config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
# The exit codes that the SDK's command documents.
EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE = 1, 2, 6
_FOLDER = click.Path(path_type=Path, file_okay=False)


def log_to_stderr(level: str = "INFO") -> None:
    """Sends log messages of at least this level to stderr."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel("WARNING")
    logging.getLogger("alembic").setLevel("WARNING")


def _connection_options(command: F) -> F:
    """Adds the options for the connections to Postgres and Temporal."""
    options = (
        click.option("--config", type=FILE, help="YAML file with settings."),
        click.option("--database", metavar="URL", help="An existing Postgres, instead of the embedded one."),
        click.option("--temporal", metavar="ADDRESS", help="host:port of an existing Temporal service, or unix:PATH."),
        click.option("--temporal-namespace", metavar="NAME", help="Temporal namespace (default: default)."),
        click.option("--temporal-tls/--no-temporal-tls", default=None, help="TLS to Temporal."),
        click.option("--temporal-ca", type=click.Path(path_type=Path), help="CA certificate of Temporal's server."),
        click.option("--temporal-cert", type=click.Path(path_type=Path), help="Client certificate for mTLS."),
        click.option("--temporal-key", type=click.Path(path_type=Path), help="Key of the client certificate."),
        click.option("--temporal-api-key", help="API key for Temporal."),
        click.option("--payload-keys", type=FILE, help="Keys of payloads in Temporal (`mizzen payload-keys`)."),
    )
    for one in reversed(options):
        command = one(command)
    return command


def _tls_options(command: F) -> F:
    """Adds the options for the certificate of the API."""
    command = click.option("--tls-key", type=FILE, help="PEM file with the private key of --tls-cert.")(command)
    return click.option("--tls-cert", type=FILE, help="PEM file with the API's certificate chain: HTTPS.")(command)


def _forget_option(command: F) -> F:
    """Adds the option that deletes secrets which the master key cannot decrypt."""
    said = "Delete secrets that the master key cannot decrypt, if the old key is lost; tenants must set them again."
    return click.option("--forget-unreadable-secrets", is_flag=True, help=said)(command)


def _settings(options: dict[str, Any], **more: Any) -> "Settings":
    temporal = {
        "address": options.get("temporal"),
        "namespace": options.get("temporal_namespace"),
        "tls": options.get("temporal_tls"),
        "tls_ca": options.get("temporal_ca"),
        "tls_cert": options.get("temporal_cert"),
        "tls_key": options.get("temporal_key"),
        "api_key": options.get("temporal_api_key"),
        "payload_keys": options.get("payload_keys"),
        **more.pop("temporal", {}),
    }
    from infra.config.settings import load_settings

    return load_settings(options.get("config"), {"database": options.get("database"), "temporal": temporal, **more})


def run_command(work: Callable[[], Any], end: Callable[[int], Any] = sys.exit) -> None:
    """Runs a command. A `MizzenError` is printed as one line and sets the exit code of its type, and so is an error of
    the connection to Postgres.
    """
    try:
        code = work() or 0
    except MizzenError as error:
        click.echo(f"mizzen: {error}", err=True)
        kinds = {ConfigurationError: EXIT_USAGE, StackError: EXIT_UNAVAILABLE}
        code = next((code for kind, code in kinds.items() if isinstance(error, kind)), EXIT_FAILED)
    except Exception as error:
        from sqlalchemy.exc import OperationalError

        if not isinstance(error, OperationalError) or error.statement is not None:
            raise
        # The text of libpq contains the host, the port, the user or the database, and no password.
        click.echo(f"mizzen: database: {' '.join(str(error.orig).split())}", err=True)
        code = EXIT_UNAVAILABLE
    end(code)


def serve_command(work: Callable[[], Any]) -> None:
    """Like `run_command`, for a process that connects to Temporal."""
    run_command(work, end_process)


@click.command()
@_connection_options
@click.option("--data-dir", type=_FOLDER, help="Folder for all state (default: mizzen-data).")
@click.option("--fleet", type=FILE, help="YAML file with regions, clusters and machines.")
@click.option("--host", help="Address on which the API listens (default: 127.0.0.1).")
@click.option("--port", type=int, help="Port of the API (default: 8080).")
@_tls_options
@click.option("--trust-tenants", is_flag=True, help="Allow several tenants where their tasks cannot be separated.")
@click.option("--console", is_flag=True, help="Open the console in a browser, already logged in as the operator.")
@_forget_option
def up(**options: Any) -> None:
    """Run the whole stack on this machine in the foreground; Ctrl-C saves workloads and stops the stack."""
    with loading():
        from server.up import fork_server, run_up

    forks = fork_server()
    log_to_stderr("WARNING")
    more = {
        "data_dir": options["data_dir"],
        "fleet": options["fleet"],
        "api": {name: options[name] for name in ("host", "port", "tls_cert", "tls_key")},
        "trust_tenants": options["trust_tenants"] or None,
    }
    forget = options["forget_unreadable_secrets"]
    console = options["console"]
    serve_command(
        lambda: asyncio.run(
            run_up(_settings(options, **more), forks, forget_unreadable_secrets=forget, console=console)
        )
    )


@click.command()
@click.option("--data-dir", type=_FOLDER, default=Path("mizzen-demo"), show_default=True)
@click.option("--keep/--no-keep", default=True, help="Keep the folder with logs and the report.")
@click.option("--plain", is_flag=True, help="Print plain lines, also in a terminal.")
def demo(data_dir: Path, keep: bool, plain: bool) -> None:
    """Run a demo: a dozen gangs in three regions, with preemption, a move and crashes; then check the results."""
    from server.demo.run import run_demo
    from server.up import fork_server

    forks = fork_server()
    log_to_stderr("ERROR")
    serve_command(lambda: asyncio.run(run_demo(data_dir, forks, keep=keep, plain=plain)))


@click.command()
@_connection_options
@click.option("--data-dir", type=_FOLDER, help="Folder for the operator's key and the master key.")
@click.option("--region", "regions", multiple=True, metavar="NAME=BUCKET", help="A region and its bucket's URL.")
@_forget_option
def init(regions: tuple[str, ...], data_dir: Path | None, forget_unreadable_secrets: bool, **options: Any) -> None:
    """Prepare an existing Postgres: schema, regions and the first operator's key. Idempotent."""
    from server.init import run_init

    forget = forget_unreadable_secrets
    run_command(lambda: run_init(_settings(options, data_dir=data_dir), regions, forget_unreadable_secrets=forget))


@click.command()
@_connection_options
@click.option("--role", "roles", multiple=True, required=True, type=click.Choice(["control", "region"]))
@click.option("--region", "regions", multiple=True, help="Region whose RMS this worker runs; repeatable.")
def worker(roles: tuple[str, ...], regions: tuple[str, ...], **options: Any) -> None:
    """Run a worker: workflows and activities (control), or bids and copies of regions (region)."""
    with loading():
        from activities.roles import run_worker

    log_to_stderr()
    serve_command(lambda: asyncio.run(run_worker(_settings(options), roles, regions)))


@click.command()
@_connection_options
@click.option("--region", required=True)
@click.option("--cluster", required=True)
@click.option("--name", help="Name of the machine (default: the host name).")
@click.option(
    "--bucket", required=True, metavar="URL", help="The region's bucket: file:///folder or s3://bucket/prefix."
)
@click.option("--state-dir", type=click.Path(path_type=Path), default=Path("mizzen-agent"), show_default=True)
@click.option("--rack", default="rack-1", show_default=True)
@click.option("--gpus", type=click.IntRange(min=0), help="GPU slots (default: the NVIDIA GPUs of the machine).")
@click.option("--gpu-type", help="Such as a100 (default: that of the NVIDIA GPUs, from the driver).")
@click.option("--cpus", type=Number(min=0, min_open=True), default=float(os.cpu_count() or 1), show_default="all")
@click.option("--memory", default=None, help="Such as 64GiB (default: the machine's memory).")
@click.option("--address", default="127.0.0.1", show_default=True, help="Address for tasks on other machines.")
@click.option("--ports", default="20000-20999", show_default=True, help="Range of ports of rendezvous and services.")
@click.option("--run-as", help="User that runs the tasks (needs root).")
@click.option(
    "--isolation",
    type=click.Choice(list(Isolation)),
    help="How tasks are separated (default: `tasks.isolation` in the settings, else the strongest possible).",
)
@click.option("--owner", help="User who lends this machine, and may take it back with `mizzen reclaim`.")
@click.option(
    "--owner-socket", type=click.Path(path_type=Path), help="The owner's socket (default: owner.sock in --state-dir)."
)
@click.option("--interface", help="Enforce rates and the kill-switch on this network interface; or: default.")
@click.option("--link-mbit", type=Number(min=0, min_open=True), default=1000.0, show_default=True)
@click.option("--rotate-key", is_flag=True, help="Create a new key, and prove possession of the old one.")
@click.option("--instance", envvar="MIZZEN_INSTANCE", default="", help="Id of the instance that launched the machine.")
@click.option("--native-id", envvar="MIZZEN_NATIVE_ID", default="", help="The provider's id of this machine.")
@click.option("--once", is_flag=True, help="Serve until the platform's notice, then end the tasks and exit.")
@click.option("--platform", help="Source of notices, such as aws-spot, or detect (default: MIZZEN_PLATFORM).")
def agent(**options: Any) -> None:
    """Run this machine's agent. It connects to Temporal and the bucket, and opens no listening port."""
    with loading():
        from server.agents import run_agent

    log_to_stderr()
    serve_command(lambda: run_agent(_settings(options), options))


@click.command()
@_connection_options
@click.option("--listen", required=True, metavar="HOST:PORT", help="Address for agents, such as 0.0.0.0:7443.")
@click.option("--tls-cert", type=FILE, required=True, help="PEM file with the certificate chain of this address.")
@click.option("--tls-key", type=FILE, required=True, help="PEM file with the certificate's private key.")
@click.option(
    "--connections-per-address", type=click.IntRange(min=1), default=1000, show_default=True,
    help="Most connections of one client address (IPv6: one /64 network).",
)  # fmt: skip
@click.option("--metrics", metavar="[HOST]:PORT", help="Serve metrics for Prometheus; without HOST, on 127.0.0.1.")
def gateway(
    listen: str,
    tls_cert: Path,
    tls_key: Path,
    connections_per_address: int,
    metrics: str | None,
    **options: Any,
) -> None:
    """Run the gateway to Temporal for agents with keys of the role `machine`."""
    from infra.addresses import parse_address

    with loading():
        from proxies.gateway.gateway_server import Certificate, run_gateway

    log_to_stderr()
    run_command(
        lambda: run_gateway(
            _settings(options),
            listen,
            Certificate(tls_cert, tls_key),
            connections_per_address=connections_per_address,
            metrics=None if metrics is None else parse_address(metrics, default_host="127.0.0.1"),
        )
    )


@click.command()
@click.option("--config", type=FILE, required=True)
@click.option("--fleet", type=FILE, required=True)
@click.option("--separate", is_flag=True, help="Do not start if the tasks of tenants cannot be separated.")
def agents(config: Path, fleet: Path, separate: bool) -> None:
    """Run the agents of all machines in a fleet file on this computer, each in its own process."""
    with loading():
        from server.agents import run_fleet

    log_to_stderr()
    from infra.config.settings import load_settings

    run_command(lambda: run_fleet(load_settings(config), fleet, separate=separate))


@click.command()
@_connection_options
@click.option("--host")
@click.option("--port", type=int)
@_tls_options
def api(host: str | None, port: int | None, tls_cert: Path | None, tls_key: Path | None, **options: Any) -> None:
    """Run the REST API."""
    with loading():
        from api.serve import serve
        from console.application import create_app

    log_to_stderr()
    given = {"host": host, "port": port, "tls_cert": tls_cert, "tls_key": tls_key}
    serve_command(lambda: serve(create_app, _settings(options, api=given)))


@dataclass(frozen=True)
class WhatIfOptions:
    """The options of `mizzen what-if`."""

    snapshot: Path = argument(type=FILE)
    changes: tuple[str, ...] = option(
        "--set", multiple=True, metavar="quota.TENANT.TYPE=N", help="Another quota. Repeatable."
    )
    drains: tuple[str, ...] = option(
        "--drain", multiple=True, metavar="REGION", help="Without this region. Repeatable."
    )
    run: RunOptions = included(RunOptions)


@click.command("what-if")
@takes(WhatIfOptions)
def what_if(given: WhatIfOptions) -> None:
    """Simulate the live fleet from a snapshot (`mizzen export`), unchanged and with other quotas or fewer regions."""
    from server import simulations

    run_command(lambda: simulations.what_if(given))


@click.command("json-schema")
@click.argument("kind", type=click.Choice(["workload", "service", "fleet", "instance"]))
def json_schema(kind: str) -> None:
    """Print the JSON Schema of a kind of document, for editors."""
    with loading():
        from server.schemas import schema_of

    click.echo(schema_of(kind))


@click.group("payload-keys")
def payload_keys() -> None:
    """Manage the keys that encrypt payloads in Temporal."""


@payload_keys.command()
@click.argument("file", type=FILE)
def rotate(file: Path) -> None:
    """Add a new key to FILE, which is created if it is missing. Processes use it within seconds; older keys decrypt."""
    from infra.payload_keys import add_key

    run_command(lambda: click.echo(f"{file}: key {add_key(file).id} encrypts from now on", err=True))


@payload_keys.command()
@click.argument("file", type=FILE)
@click.argument("machine", metavar="REGION/CLUSTER/MACHINE")
def machine(file: Path, machine: str) -> None:
    """Print a machine's keys, for `mizzen agent --payload-keys` without a gateway. FILE has the installation's."""
    from infra.payload_keys import machine_lines

    run_command(lambda: click.echo(machine_lines(file, machine), nl=False))


@click.group()
def group() -> None:
    """Commands of mizzen's server."""


for _command in (up, demo, init, worker, agent, agents, gateway, api, payload_keys, what_if, json_schema):
    group.add_command(_command)
